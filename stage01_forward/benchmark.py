"""What a forward pass costs, predicted and measured: `python -m stage01_forward.benchmark`.

A proof precedes every timing, with the same weights, dtype and linear layers. It compares the
packed model with `transformers`' logits, and the engine's tokens with `transformers`' tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.testing import assert_close

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing, speed, takes
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, first, gain, ms
from shared.peers import transformers_batch, transformers_model
from shared.roofline import forward_cost, naive_costs

from .attention import Recompute, explicit_attention, fused_attention
from .engine import Engine
from .model import GPT2, load_model

OURS, PLAIN, PEER = "ours", "ours, plain", "transformers"
# The largest difference from transformers' logits in float32; bfloat16 keeps 8 bits.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}

FULL = kit.plan(
    models=("gpt2", "stories"), dtypes=kit.BOTH, repeats=5,
    lengths=(1, 8, 32, 128, 512, 1023), attention=(16, 64, 256, 1024),
    prompt=5, answer=50, generation_repeats=2, profiled=(1, 64, 8),
)  # fmt: skip


def last_logits(model: GPT2, ids: list[int]) -> torch.Tensor:
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
    return model.logits(hidden[-1])


def forward(subject: Subject, plan: Any) -> Iterator[Group]:
    """One forward pass over T tokens, logits for the last: packed, plain, and `transformers`. The
    packed model's logits are checked against those of `transformers` in float32."""
    peer, reference = subject.peer("sdpa"), transformers_model(subject.shape, torch.float32)
    plain = load_model(subject.shape, dtype=subject.dtype)
    for length in plan.lengths:
        (ids,) = subject.prompts([length], "forward")
        ways = {
            OURS: partial(last_logits, subject.model, ids),
            PLAIN: partial(last_logits, plain, ids),
            PEER: partial(peer, torch.tensor([ids]), use_cache=False, logits_to_keep=1),
        }
        with torch.inference_mode():
            wanted = reference(torch.tensor([ids])).logits[0, -1]
            assert_close(ways[OURS]().float(), wanted, rtol=0, atol=CLOSE[subject.dtype])
            taken = measure.alternate(ways, plan.repeats)
        yield {"context": length, "seconds": taken}


def attention(subject: Subject, plan: Any) -> Iterator[Group]:
    """Attention alone, one layer: written out and fused, which must agree."""
    heads, size = subject.config.n_head, subject.config.head_dim
    for length in plan.attention:
        generator = torch.Generator().manual_seed(length)
        qkv = torch.randn(3, heads, length, size, generator=generator).to(subject.dtype)
        explicit, fused = partial(explicit_attention, *qkv), partial(fused_attention, *qkv)
        assert_close(explicit(), fused(), rtol=0, atol=CLOSE[subject.dtype])
        with torch.inference_mode():
            ways = {"explicit": explicit, "fused": fused}
            taken = measure.alternate(ways, plan.repeats, warmup=2)
        scores = heads * length * length * subject.dtype.itemsize
        yield {"context": length, "bytes": scores, "seconds": taken}


def generation(subject: Subject, plan: Any) -> Iterator[Group]:
    """Tokens one after the other, each computed from scratch: this engine, and `transformers`
    without its cache, whose tokens are checked against ours."""
    model = subject.peer("sdpa")
    peer = kit.Peer(lambda prompts, n: transformers_batch(model, prompts, max(n), use_cache=False))
    engines, lengths = {OURS: Engine(subject.model), PEER: peer}, [(plan.prompt, plan.answer)]
    group, runs = kit.compare(subject, engines, lengths, plan.generation_repeats, "generation")
    group["proof"][PEER] = subject.prove(runs[PEER].outputs[-1])
    yield group


def limit(row: Row) -> float:
    """Least seconds of a forward pass."""
    return row.least([forward_cost(row.config, row.kind, row["context"])])


def naive(row: Row) -> float:
    """Least seconds of an answer."""
    return row.least(naive_costs(row.config, row.kind, row.lengths))


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts, for GPT-2 in float32."""
    single, few, many, *_, last = (row.of(OURS) for row in first("forward")(results))
    why = "a product of one row does not reach the bandwidth"
    yield takes("a pass over one token", single, limit, why)
    why = "norms, GELU and softmax are not counted; no product reaches the peak"
    yield takes(f"a pass over {last['context']:,} tokens", last, limit, why)
    for row, why in (
        (few, "the weights are read once for all"),
        (many, "a product of few rows reaches neither the bandwidth nor the peak"),
    ):
        what = f"{row['context']} tokens, over one token"
        yield Claim(what, limit(row) / limit(single), row.median / single.median, "x", why)
    answer = first("generation")(results)[0].of(OURS)
    why = "its passes are short, far from both limits"
    yield speed(f"{answer.tokens} new tokens", answer, naive, why)


COLUMNS: dict[str, rows.Column] = {
    "tokens": "context",
    "layers": "linear",
    "limit, ms": lambda row: f"{limit(row) * 1e3:.1f}",
    "share of it": lambda row: f"{limit(row) / row.of(OURS).median:.0%}",
    "plain layers, ms": ms(PLAIN),
    "over transformers": gain(PEER, variant=OURS),
    "over plain layers": gain(PLAIN, variant=OURS),
    "scores kept, MB": "bytes * 1e-6:.2f",
    "explicit, ms": ms("explicit", 3),
    "fused, ms": ms("fused", 3),
    "gain": gain("explicit", variant="fused"),
    "transformers without cache, tok/s": lambda row: row.of(PEER).rate.show(),
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


def forward_chart(results: Results) -> Figure:
    groups, bound = first("forward")(results), "machine's limit"
    drawn = {"transformers": PEER, "plain layers": PLAIN, "packed layers": OURS}
    values = {name: [1e3 * row.of(at).median for row in groups] for name, at in drawn.items()}
    return charts.lines(
        "Eight tokens in one step cost less than two steps of one token",
        "tokens in the step (GPT-2 124M shape, float32)",
        "milliseconds",
        [row["context"] for row in groups],
        values | {bound: [1e3 * limit(row) for row in groups]},
        dashed=[bound],
        log_x=True,
        log_y=True,
    )


def headline(results: Results) -> str:
    row = results.groups("generation", dtype="float32")[0].of(OURS)
    return (
        f"{row.rate.median:.1f} tok/s over {row.tokens} tokens: right, and slow "
        "(GPT-2 124M shape, float32)"
    )


WORK = kit.cases(
    Case(forward),
    Case(attention),
    Case(generation, models=None),
    Case(kit.profile({"": Engine}), dtypes=1),
)
CHARTS = {"forward": forward_chart}
BENCHMARK = kit.Benchmark("stage01_forward", __doc__, FULL, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
