"""What a forward pass costs, predicted and measured: `python -m stage01_forward.benchmark`.

Passes over more and more tokens and whole answers, beside `transformers` with the same weights.
Every pass is proved by the logits of `transformers`, every answer by one pass over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from shared import charts, cli, kit
from shared.kit import Results, Row, Subject
from shared.peers import transformers_batch, transformers_model
from shared.roofline import naive_costs

from .attention import Recompute
from .engine import Engine
from .generation import Output
from .model import GPT2
from .params import SamplingParams

OURS, PEER = "ours", "transformers"
PROMPT, ANSWER = 5, 50  # tokens


@torch.inference_mode()
def last_logits(model: GPT2, ids: list[int]) -> torch.Tensor:
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
    return model.logits(hidden[-1])


class Peer:
    """transformers without its cache, as an engine."""

    def __init__(self, model: Any) -> None:
        self.model, self.steps = model, ()

    def generate(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[Output]:
        count = sampling[0].max_tokens
        answers = transformers_batch(self.model, prompts, count, use_cache=False)
        return [Output(prompt, ids) for prompt, ids in zip(prompts, answers, strict=True)]


def measure(bench: kit.Bench) -> None:
    pairs = ("gpt2", "float32"), ("gpt2", "bfloat16"), ("stories", "float32")
    for subject in bench.subjects(*pairs, plain=True):
        peer = transformers_model(subject.shape, subject.dtype)
        if subject.about["model"] == "gpt2" or bench.quick:
            passes(bench, subject, peer)
        engines = {OURS: Engine(subject.model), PEER: Peer(peer)}
        bench.answers("generation", subject, engines, [(PROMPT, ANSWER)])


def passes(bench: kit.Bench, subject: Subject, peer: Any) -> None:
    """One pass over some tokens, with logits for the last."""
    exact = transformers_model(subject.shape, torch.float32)
    for tokens in bench.sizes(1, 8, 32, 128, 512, 1023):
        (ids,) = subject.prompts([tokens], "forward")
        ours = partial(last_logits, subject.model, ids)
        theirs = partial(peer, torch.tensor([ids]), use_cache=False, logits_to_keep=1)

        def proof(ours: Any = ours, ids: list[int] = ids) -> Any:
            wanted = exact(torch.tensor([ids])).logits[0, -1]
            return kit.prove(wanted[None], ours().argmax()[None], subject.dtype)

        with torch.inference_mode():
            ways = {OURS: ours, PEER: theirs}
            bench.row("forward", ways, prove=proof, tokens=tokens, **subject.about)


def limit(row: Row) -> float:
    """Least seconds of a pass."""
    return row.bound(row["tokens"])


def tables(results: Results) -> kit.Tables:
    forward = [
        {
            "dtype": row["dtype"], "tokens": row["tokens"], "limit, ms": f"{1e3 * limit(row):.1f}",
            "ours, ms": row.ms(OURS), "of the limit": f"{limit(row) / row.median(OURS):.0%}",
            "transformers, ms": row.ms(PEER), "over transformers": f"{row.gain(PEER, OURS):.2f}x",
        }
        for row in results.rows("forward")
    ]  # fmt: skip
    generation = [
        {
            "model": row["model"], "dtype": row["dtype"], "ours, tok/s": row.rate(OURS),
            "transformers, tok/s": row.rate(PEER),
            "over transformers": f"{row.gain(PEER, OURS):.2f}x", "same tokens": row.proof,
        }
        for row in results.rows("generation")
    ]  # fmt: skip
    return {"forward": forward, "generation": generation, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts, for GPT-2 in float32."""
    rows = {row["tokens"]: row for row in results.rows("forward", model="gpt2", dtype="float32")}
    for tokens, hand, why in (
        (1, 12.4, "a product of one row does not reach the bandwidth"),
        (1023, 966, "by hand the machine has half the arithmetic; no product reaches its peak"),
    ):
        if row := rows.get(tokens):
            what = "a pass over one token" if tokens == 1 else f"a pass over {tokens:,} tokens"
            yield kit.claim(what, hand, 1e3 * limit(row), 1e3 * row.median(OURS), "ms", why)
    for tokens, hand in ((8, 1.0), (32, 2.24)):
        if (row := rows.get(tokens)) and (single := rows.get(1)):
            measured = row.median(OURS) / single.median(OURS)
            here, why = limit(row) / limit(single), "products of few rows are far from both limits"
            yield kit.claim(f"{tokens} tokens, over one", hand, here, measured, "x", why)
    for row in results.rows("generation", model="gpt2", dtype="float32"):
        here = row.tokens / row.least(naive_costs(row.config, row.kind, row.lengths))
        why, measured = "its passes are short, far from both limits", row.tokens / row.median(OURS)
        yield kit.claim(f"{row.tokens} new tokens", 38.0, here, measured, "tok/s", why)


def chart(results: Results) -> charts.Figure:
    rows = results.rows("forward", dtype="float32")
    drawn = {name: [1e3 * row.median(name) for row in rows] for name in (PEER, OURS)}
    return charts.lines(
        "A pass over eight tokens costs less than two over one",
        "tokens in the pass (GPT-2 124M shape, float32)", "milliseconds",
        [row["tokens"] for row in rows],
        drawn | {"machine's limit": [1e3 * limit(row) for row in rows]},
        dashed=["machine's limit"], log_x=True, log_y=True,
    )  # fmt: skip


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("generation", model="gpt2", dtype="float32"):
        yield f"{row.rate(OURS)} tok/s over {row.tokens} tokens: right, and slow"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage01_forward", __doc__, measure, tables))
