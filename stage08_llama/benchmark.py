"""What the Llama family's architecture buys and costs: `python -m stage08_llama.benchmark`.

Grouped heads beside the same weights with repeated keys and values; the new pieces of a layer in
eager PyTorch; one request on a whole model. Every step is proved by the repeated heads, and every
answer by one pass over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from shared import charts, cli, kit
from shared.kit import Results, Row, Subject
from shared.roofline import forward_cost, static_costs
from stage02_kv_cache.engine import Engine
from stage04_continuous.cache import SlotCache
from stage04_continuous.runner import Runner

from .config import LlamaConfig
from .model import RepeatedHeads, RMSNorm
from .rope import frequencies, rotate, rotation

SMOL = "HuggingFaceTB/SmolLM2-135M"
PAIR = REPEATED, GROUPED = "repeated", "grouped"
PROMPT, ANSWER = 64, 32  # tokens of one request


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects((SMOL, "float32"), (SMOL, "bfloat16"), quick="stories-chat"):
        for count, context in bench.sizes((1, 64), (1, 1024), (32, 64), (32, 1024)):
            heads(bench, subject, count, context)
        pieces(bench, subject)
        bench.answers("request", subject, {"ours": Engine(subject.model)}, [(PROMPT, ANSWER)])


def heads(bench: kit.Bench, subject: Subject, count: int, context: int) -> None:
    """A decode step over equal sequences, with repeated and with grouped keys and values."""
    config, dtype, before = subject.config, subject.dtype, RepeatedHeads(subject.model)
    grouped = SlotCache(config, count, context + 1, dtype)
    repeated = SlotCache(before.config, count, context + 1, dtype)
    grouped.kv.normal_(generator=torch.Generator().manual_seed(0))
    repeated.kv.copy_(grouped.kv.repeat_interleave(config.n_head // config.n_kv_head, 3))
    ids = list(range(count))
    inputs = ids, [(row, context, 1) for row in ids], ids
    ways = {
        REPEATED: partial(Runner(before, repeated).run, *inputs),
        GROUPED: partial(Runner(subject.model, grouped).run, *inputs),
    }
    proof = partial(kit.prove, ways[REPEATED]().float(), ways[GROUPED]().argmax(-1), dtype)
    about = subject.about | {"bytes": {REPEATED: repeated.kv.nbytes, GROUPED: grouped.kv.nbytes}}
    bench.row("heads", ways, 4, 1, proof, rows=count, context=context, **about)


@torch.inference_mode()
def pieces(bench: kit.Bench, subject: Subject) -> None:
    """The new pieces of a layer for one token, beside GPT-2's LayerNorm and a matrix."""
    config, width = subject.config, subject.config.n_embd
    assert isinstance(config, LlamaConfig)
    layer, rms = nn.LayerNorm(width).to(subject.dtype), RMSNorm(width, 1e-5).to(subject.dtype)
    nn.init.ones_(rms.weight)
    gate = nn.Linear(width, config.n_inner, bias=False).to(subject.dtype)
    turns = rotation(torch.arange(1), frequencies(config.rope, config.head_dim))
    x = torch.randn(1, width).to(subject.dtype)
    ways = {
        "LayerNorm": partial(layer, x),
        "RMSNorm": partial(rms, x),
        "rotation of the queries": partial(rotate, x.unflatten(-1, (config.n_head, -1)), *turns),
        "a matrix of the MLP": partial(gate, x),
    }
    bench.row("pieces", ways, 25, **subject.about)


def predicted(row: Row) -> float:
    """The gain of grouped heads: of the least seconds of a decode step, which reads weights, keys
    and values, or computes."""
    cost = forward_cost(row.config, row.kind, 1, 0, rows=row["rows"])
    rate, size = row.limits["memory"] * 1e9, row["bytes"]
    least = [max((cost.bytes + size[n]) / rate, row.least(cost)) for n in PAIR]
    return least[0] / least[1]


def tables(results: Results) -> kit.Tables:
    heads = [
        {
            "dtype": row["dtype"], "rows": row["rows"], "context": row["context"],
            "repeated, ms": row.ms(REPEATED), "grouped, ms": row.ms(GROUPED),
            "gain": f"{row.gain(*PAIR):.2f}x", "predicted": f"{predicted(row):.2f}x",
            "cache, MB": " and ".join(f"{row['bytes'][n] / 1e6:,.0f}" for n in PAIR),
            "same tokens": row.proof,
        }
        for row in results.rows("heads")
    ]  # fmt: skip
    pieces = [
        {"dtype": row["dtype"]} | {f"{n}, us": f"{1e6 * row.median(n):.0f}" for n in row["seconds"]}
        for row in results.rows("pieces")
    ]
    return {"heads": heads, "pieces": pieces, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts of grouped heads and of one request, in float32."""
    control = "the control: hardly any cache is read"
    for rows, context, hand, why in ((1, 64, 1.01, control), (32, 1024, 2.48, "not known")):
        for row in results.rows("heads", model=SMOL, dtype="float32", rows=rows, context=context):
            what, gain = f"repeated over grouped, {rows} x {context:,} tokens", row.gain(*PAIR)
            yield kit.claim(what, hand, predicted(row), gain, "x", why)
    for row in results.rows("pieces", model=SMOL, dtype="float32"):
        parts = 61 * row.median("RMSNorm") + 60 * row.median("rotation of the queries")
        why = "an operator of this size takes less than 5 us to start"
        yield kit.claim("norms and rotations of a pass", 3.0, 3.0, 1e3 * parts, "ms", why)
    for row in results.rows("request", model=SMOL, dtype="float32"):
        here = row.tokens / row.least(static_costs(row.config, row.kind, row.lengths))
        why = "a product of one row does not reach the bandwidth"
        yield kit.claim("one request", 54.7, here, row.tokens / row.median("ours"), "tok/s", why)


def chart(results: Results) -> charts.Figure:
    rows = [row for row in results.rows("heads", dtype="float32") if row["context"] == 1024]
    return charts.bars(
        "Shared keys are read once: a decode step at 1,024 tokens of context",
        "milliseconds (SmolLM2-135M shape, float32)",
        ["1 row" if row["rows"] == 1 else f"{row['rows']} rows" for row in rows],
        {name: [1e3 * row.median(name) for row in rows] for name in PAIR},
    )


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("heads", dtype="float32", rows=32, context=1024):
        gain = row.gain(*PAIR)
        yield f"a third of the cache, and {gain:.1f}x the tok/s of repeated keys with 32 rows"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage08_llama", __doc__, measure, tables))
