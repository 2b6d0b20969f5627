"""What a forward pass costs, predicted and measured: `python -m stage01_forward.benchmark`.

Every timing comes after a proof for the same weights, dtype and linear layers: the packed model
against `transformers`' logits, the engine's tokens against `transformers`' tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shared import cli, measure
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, first, gain, ms
from shared.peers import transformers_model
from shared.roofline import forward_cost, naive_costs

from .attention import Recompute, explicit_attention, fused_attention
from .engine import Engine
from .model import GPT2, load_model

OURS, PLAIN, PEER = "ours", "ours, plain", "transformers"
# Largest difference of logits from transformers' in float32; bfloat16 keeps 8 bits.
LOGIT_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Sizes(kit.Plan):
    models: tuple[str, ...] = ("gpt2", "stories")
    lengths: tuple[int, ...] = (1, 8, 32, 128, 512, 1023)
    attention: tuple[int, ...] = (16, 64, 256, 1024)
    prompt: int = 5
    answer: int = 50
    profiled: int = 64
    repeats: int = 5
    generation_repeats: int = 2


FULL = Sizes()
QUICK = kit.quick(FULL)


def last_logits(model: GPT2, ids: list[int]) -> torch.Tensor:
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
    return model.logits(hidden[-1])


@torch.inference_mode()
def prove_logits(model: GPT2, peer: Any, ids: list[int]) -> float:
    """The largest difference from `peer`'s float32 logits. Raises AssertionError above the
    bound."""
    theirs = peer(torch.tensor([ids])).logits[0, -1]
    difference = float((last_logits(model, ids).float() - theirs).abs().max())
    if difference > (bound := LOGIT_BOUND[model.dtype]):
        raise AssertionError(
            f"{kit.label(model.dtype)} logits differ from transformers' by {difference}, over "
            f"{bound}"
        )
    return difference


def forward(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """One forward pass over T tokens, logits for the last: packed, plain, and `transformers`."""
    peer, reference = subject.peer("sdpa"), transformers_model(subject.shape, torch.float32)
    plain = load_model(subject.shape, dtype=subject.dtype)
    for length in plan.lengths:
        (ids,) = subject.prompts([length], "forward")
        difference = prove_logits(subject.model, reference, ids)
        ways = {
            OURS: partial(last_logits, subject.model, ids),
            PLAIN: partial(last_logits, plain, ids),
            PEER: partial(peer, torch.tensor([ids]), use_cache=False, logits_to_keep=1),
        }
        with torch.inference_mode():
            taken = measure.alternate(ways, plan.repeats)
        yield {"context": length, "difference": difference, "seconds": taken}


def attention(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Attention alone, one layer: written out and fused."""
    heads, size = subject.config.n_head, subject.config.head_dim
    for length in plan.attention:
        generator = torch.Generator().manual_seed(length)
        qkv = torch.randn(3, heads, length, size, generator=generator).to(subject.dtype)
        ways = {
            "explicit": partial(explicit_attention, *qkv),
            "fused": partial(fused_attention, *qkv),
        }
        difference = float((ways["explicit"]() - ways["fused"]()).abs().max())
        scores = heads * length * length * subject.dtype.itemsize
        with torch.inference_mode():
            taken = measure.alternate(ways, plan.repeats, warmup=2)
        yield {"context": length, "bytes": scores, "difference": difference, "seconds": taken}


def generation(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Tokens one after the other, each computed from scratch: this engine, and `transformers`
    without its cache. Its tokens are proved by ours."""
    engines = {
        OURS: Engine(subject.model),
        PEER: kit.Peer.static(subject.peer("sdpa"), use_cache=False),
    }
    lengths = [(plan.prompt, plan.answer)]
    group, runs = kit.compare(subject, engines, lengths, plan.generation_repeats, "generation")
    group["proof"][PEER] = subject.prove(runs[PEER].outputs[-1])
    yield group


def profile(subject: Subject, plan: Sizes) -> list[Group]:
    run = partial(Engine(subject.model).generate, subject.prompts([plan.profiled], "profile"))
    return [kit.profiled(subject, "", partial(run, kit.greedy(8)))]


def limit(row: Row) -> float:
    """Seconds of a forward pass, at least."""
    return row.least([forward_cost(row.config, row.kind, row["context"])])


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts, for GPT-2 in float32."""
    forwards = first("forward")(results)
    one, *_, last = forwards
    for row, why in (
        (one, "a product of one row reads at about half of the bandwidth"),
        (last, "norms, GELU and softmax are not counted; no product reaches the peak"),
    ):
        tokens = "one token" if row is one else f"{row['context']:,} tokens"
        measured = row.of(OURS).median
        yield Claim(f"a pass over {tokens}", limit(row) * 1e3, measured * 1e3, "ms", why)
    few = "a product of few rows reaches neither the bandwidth nor the peak"
    for row, why in zip(forwards[1:3], ("the weights are read once for all", few), strict=False):
        what = f"{row['context']} tokens, over one token"
        quotient = row.of(OURS).median / one.of(OURS).median
        yield Claim(what, limit(row) / limit(one), quotient, "x", why)
    answer = first("generation")(results)[0].of(OURS)
    least = answer.least(naive_costs(answer.config, answer.kind, answer.lengths))
    what, why = f"{answer.tokens} new tokens", "its passes are short, far from both limits"
    yield Claim(what, answer.tokens / least, answer.rate.median, "tok/s", why)


COLUMNS: dict[str, rows.Column] = {
    "tokens": "context",
    "layers": "linear",
    "limit, ms": lambda row: f"{limit(row) * 1e3:.1f}",
    "share of it": lambda row: f"{limit(row) / row.of(OURS).median:.0%}",
    "plain layers, ms": ms(PLAIN),
    "over transformers": gain(PEER, variant=OURS),
    "over plain layers": gain(PLAIN, variant=OURS),
    "scores kept, MB": lambda row: f"{row['bytes'] / 1e6:.2f}",
    "explicit, ms": ms("explicit", 3),
    "fused, ms": ms("fused", 3),
    "gain": gain("explicit", variant="fused"),
    "transformers without cache, tok/s": lambda row: row.of(PEER).rate.show(),
    "same tokens": lambda row: row.of(PEER).proof,
}
TABLES = rows.tables(
    COLUMNS,
    """
    forward: dtype | tokens | limit, ms | ours, ms | share of it | transformers, ms
      | over transformers
    attention: dtype | tokens | scores kept, MB | explicit, ms | fused, ms | gain
    linear < forward: dtype | tokens | layers | plain layers, ms | ours, ms | over plain layers
    generation: model | dtype | ours, tok/s | transformers without cache, tok/s
      | over transformers | same tokens
    """,
    profile=rows.operators,
    claims=closing(claims),
)
BOUND = "machine's limit"
CHARTS = {
    "forward": rows.lines(
        "Eight tokens in one step cost less than two steps of one token",
        ("tokens in the step (GPT-2 124M shape, float32)", "milliseconds"),
        first("forward"),
        "context",
        {"transformers": PEER, "plain layers": PLAIN, "packed layers": OURS, BOUND: limit},
        unit=1e3,
        dashed=[BOUND],
        log_x=True,
        log_y=True,
    )
}


def headline(results: Results) -> str:
    row = results.groups("generation", dtype="float32")[0].of(OURS)
    return (
        f"{row.rate.median:.1f} tok/s over {row.tokens} tokens: right, and slow "
        "(GPT-2 124M shape, float32)"
    )


ABOUT = "Measures the forward pass and the naive engine on this CPU, after proving them."
WORK = kit.cases(
    Case(forward), Case(attention), Case(generation, models=None), Case(profile, dtypes=1)
)
BENCHMARK = kit.Benchmark("stage01_forward", ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
