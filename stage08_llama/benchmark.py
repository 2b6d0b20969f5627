"""What the Llama family's architecture buys and costs: `python -m stage08_llama.benchmark`.

Grouped heads beside the same weights with repeated keys and values; the new pieces of a layer in
eager PyTorch; whole models against the machine's limits. Every pass is proved by the repeated
heads, and every answer by stage 01's engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from shared import charts, checkpoint, cli, measure, models
from shared.bench import kit, rows
from shared.bench.claims import ROUND, Claim, closing, faster, speed
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, first
from shared.roofline import forward_cost, static_costs
from stage02_kv_cache.engine import Engine
from stage04_continuous.cache import SlotCache
from stage04_continuous.runner import Runner

from .config import LlamaConfig
from .model import Llama, RepeatedHeads, RMSNorm
from .rope import frequencies, rotate, rotation
from .shapes import PRESETS

STARTED = 600 * 5e-6  # seconds that the small operators of a pass take to start, as predicted
SMOL = "HuggingFaceTB/SmolLM2-135M"
REPEATED, GROUPED = "repeated", "grouped"


FULL = kit.plan(
    models=(SMOL, "gpt2"), dtypes=kit.BOTH,
    rows=(1, 8, 32), contexts=(64, 1024), repeats=7,
    tokens=(1, 32, 512), piece_repeats=50,  # in a pass, where the new pieces are timed
    lengths=((512, 1), (64, 32)), story=(16, 256), whole_repeats=3,
)  # fmt: skip


def heads(subject: Subject, plan: Any) -> Iterator[Group]:
    """A decode step over equal sequences, with repeated and with grouped keys and values."""
    config, dtype, model = subject.config, subject.dtype, subject.model
    assert isinstance(model, Llama)
    before = RepeatedHeads(model)
    for count, context in product(plan.rows, plan.contexts):
        grouped = SlotCache(config, count, context + 1, dtype)
        repeated = SlotCache(before.config, count, context + 1, dtype)
        grouped.kv.normal_(generator=torch.Generator().manual_seed(0))
        repeated.kv.copy_(grouped.kv.repeat_interleave(config.n_head // config.n_kv_head, 3))
        ids, shares = list(range(count)), [(row, context, 1) for row in range(count)]
        ways = {
            REPEATED: partial(Runner(before, repeated).run, ids, shares, ids),
            GROUPED: partial(Runner(model, grouped).run, ids, shares, ids),
        }
        yield {
            "count": count,
            "context": context,
            "bytes": {REPEATED: repeated.bytes, GROUPED: grouped.bytes},
            "proof": kit.prove(ways[REPEATED]().float(), ways[GROUPED]().argmax(-1), dtype),
            "seconds": measure.alternate(ways, plan.repeats),
        }


@torch.inference_mode()
def pieces(subject: Subject, plan: Any) -> Iterator[Group]:
    """The new pieces of a layer, in eager PyTorch, beside GPT-2's LayerNorm and the layer's
    matrices."""
    config = subject.config
    assert isinstance(config, LlamaConfig)
    width, generator = config.n_embd, torch.Generator()
    layer, rms = nn.LayerNorm(width).to(subject.dtype), RMSNorm(width, 1e-5).to(subject.dtype)
    nn.init.ones_(rms.weight)
    gate = nn.Linear(width, config.n_inner, bias=False).to(subject.dtype)
    turns = frequencies(config.rope, config.head_dim)
    for count in plan.tokens:
        x = torch.randn(count, width, generator=generator.manual_seed(0)).to(subject.dtype)
        turned = partial(rotate, x.unflatten(-1, (config.n_head, -1)))
        ways = {
            "LayerNorm": partial(layer, x),
            "RMSNorm": partial(rms, x),
            "rotation of the queries": partial(turned, *rotation(torch.arange(count), turns)),
            "one matrix of the MLP": partial(gate, x),
        }
        yield {"count": count, "seconds": measure.alternate(ways, plan.piece_repeats)}


def whole(subject: Subject, plan: Any) -> Iterator[Group]:
    """One request on stage 02's engine: a prompt, and an answer."""
    for lengths in plan.lengths:
        engine = {"ours": Engine(subject.model)}
        yield kit.compare(subject, engine, [lengths], plan.whole_repeats)[0]


def twin(subject: Subject, plan: Any) -> Iterator[Group]:
    """The embedded GPT-2 and Llama, of the same size and trained on the same grammar. Their scores
    are kept beside their speed."""
    for name in ("stories", "stories-chat"):
        card = checkpoint.EMBEDDED[name] / "evaluation.json"
        judged = json.loads(card.read_text(encoding="utf-8"))
        ours = Subject(models.load(name), subject.dtype)
        group = kit.compare(ours, {"ours": Engine(ours.model)}, [plan.story], plan.whole_repeats)[0]
        yield group | {
            "model": name,
            "parameters": ours.config.parameter_count,
            "kv": ours.config.kv_bytes_per_token(ours.dtype),
            **{key: judged["held_out"][key] for key in ("excess", "copied_right")},
            "straight": [judged["sampled"][key] for key in ("straight", "stories")],
            "beyond": judged.get("beyond", []),
        }


def step(row: Row) -> float:
    """Least seconds of a decode step by bytes and operations."""
    cost = forward_cost(row.config, row.kind, 1, 0, rows=row["count"])
    reading = (cost.bytes + row["bytes"]) / row.bandwidth
    return max(reading, row.least([cost]))


def far(row: Row) -> str:
    """Nats a token by position, on texts longer than those of the training."""
    steps = ["{cross_entropy:.2f} from {from:,}".format_map(span) for span in row["beyond"]]
    return ", ".join(steps[:1] + steps[-1:]) or "no position beyond 1,024"


def least(row: Row) -> float:
    return row.least(static_costs(row.config, row.kind, row.lengths))


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts of grouped heads and of one request, in float32."""
    groups = {(row["count"], row["context"]): row for row in first("heads")(results)}
    win, null = groups[max(groups)], groups[min(groups)]
    slow, fast = (1e3 * (win.of(way).median - step(win.of(way))) for way in (REPEATED, GROUPED))
    for row, why in (
        (
            win,
            f"both take longer than their bytes, by {slow:.0f} and {fast:.0f} ms; attention's "
            "arithmetic is a small part of that, and the rest is not known",
        ),
        (null, "the control: one row reads hardly anything but weights"),
    ):
        what = f"repeated over grouped, {row['count']} x {row['context']:,} tokens"
        yield faster(what, row, (REPEATED, GROUPED), step, why)
    single = next(row for row in results.rows("whole") if row.tokens > 1)
    rounded = Row(Results(results.content, ROUND), single.group, single.variant)
    why = "a product of one row reads at half of the bandwidth, and 600 small operators start"
    yield replace(
        speed("one request", single, least, why),
        by_hand=1 / (least(rounded) / rounded.tokens + STARTED),
    )


COLUMNS = rows.limits_of(least) | {
    "rows": "count",
    "tokens": "count",
    "gain (predicted)": rows.gain(REPEATED, step, GROUPED),
    "cache, repeated and grouped, MB": lambda row: (
        f"{row['bytes'][REPEATED] / 1e6:,.1f}, {row['bytes'][GROUPED] / 1e6:,.1f}"
    ),
    "rotation of q, us": rows.UNITS["us"]("rotation of the queries"),
    "a matrix of the MLP, us": rows.UNITS["us"]("one matrix of the MLP"),
    "parameters": lambda row: f"{row.config.parameter_count / 1e6:,.0f} M",
    "numbers": "parameters:,",
    "keys and values a token, bytes": "kv:,",
    "above the floor": "excess:.1%",
    "repeated words right": "copied_right:.1%",
    "straight stories": lambda row: "{} of {}".format(*row["straight"]),
    "nats a token": far,
    "float32, GB": lambda row: f"{4e-9 * row.config.parameter_count:.1f}",
    "bfloat16, GB": lambda row: f"{2e-9 * row.config.parameter_count:.1f}",
    "keys and values a token, KiB": lambda row: (
        f"{row.config.kv_bytes_per_token(row.kind) / 1024:,.1f}"
    ),
    "bfloat16, at most tok/s here": lambda row: (
        f"{row.bandwidth / forward_cost(row.config, row.kind, 1).bytes:,.0f}"
    ),
}
TABLES = rows.tables(
    COLUMNS,
    """
    heads: dtype | rows | context | repeated, ms | grouped, ms | gain (predicted)
      | cache, repeated and grouped, MB | same tokens
    pieces: dtype | tokens | LayerNorm, us | RMSNorm, us | rotation of q, us
      | a matrix of the MLP, us
    whole: model | dtype | prompt | answer | tok/s | limit, tok/s | same tokens
    published: model | parameters | float32, GB | bfloat16, GB | keys and values a token, KiB
      | bfloat16, at most tok/s here
    twin: model | numbers | keys and values a token, bytes | ours, tok/s | above the floor
      | repeated words right | straight stories
    far < twin: model | nats a token
    """,
    whole=lambda results: results.rows("whole"),
    claims=closing(claims),
    published=lambda results: [Row(results, {"model": m, "dtype": "bfloat16"}) for m in PRESETS],
)


def heads_chart(results: Results) -> Figure:
    groups = first("heads", context=max(FULL.contexts))(results)
    return charts.bars(
        f"Shared keys are read once: a decode step at {groups[0]['context']:,} tokens of context",
        "milliseconds (SmolLM2-135M shape, float32)",
        [kit.counted(row["count"], "row") for row in groups],
        {name: [1e3 * row.of(name).median for row in groups] for name in (REPEATED, GROUPED)},
    )


def headline(results: Results) -> str:
    row = results.groups("heads", dtype="float32")[-1]
    return (
        f"{row['count']} rows at {row['context']:,} tokens: a third of the cache, and "
        f"{row.gain(REPEATED, GROUPED):.1f}x the tok/s of repeated keys "
        "(SmolLM2-135M shape, float32)"
    )


CHARTS = {"heads": heads_chart}
WORK = kit.cases(Case(heads), Case(pieces), Case(whole, models=None), Case(twin, dtypes=1))
FEW = {"rows": (1, 8)}
BENCHMARK = kit.Benchmark("stage08_llama", __doc__, FULL, WORK, TABLES, CHARTS, headline, FEW)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
