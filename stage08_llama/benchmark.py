"""What the Llama family's architecture buys and costs: `python -m stage08_llama.benchmark`.

Grouped heads against the same weights with keys and values repeated, side by side; the pieces that
are new in eager PyTorch; whole models against the machine's limits. Every pass is proved by the
repeated heads, and every answer by stage 01's engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import nn

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.forecast import static_costs
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row
from shared.roofline import forward_cost
from stage02_kv_cache.engine import Engine
from stage04_continuous.cache import SlotCache
from stage04_continuous.runner import Runner

from .config import LlamaConfig
from .family import PRESETS
from .model import Llama, RMSNorm
from .repeated import RepeatedHeads
from .rope import frequencies, rotate, rotation

STAGE = "stage08_llama"
SMOL, QWEN = "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-0.6B"
REPEATED, GROUPED = "repeated", "grouped"


@dataclass(frozen=True)
class Sizes(kit.Plan):
    models: tuple[str, ...] = (SMOL, "gpt2")
    rows: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (64, 1024)
    repeats: int = 7
    tokens: tuple[int, ...] = (1, 32, 512)  # in a pass, where the new pieces are timed
    piece_repeats: int = 50
    lengths: tuple[tuple[int, int], ...] = ((512, 1), (64, 32))
    whole_repeats: int = 3
    real: bool = True


FULL = Sizes()
QUICK = kit.quick(FULL, rows=(1, 8), real=False)


# ---- measurements -------------------------------------------------------------------------------


def heads(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A decode step over equal sequences: keys and values repeated, and grouped."""
    config, dtype, model = subject.config, subject.dtype, subject.model
    assert isinstance(model, Llama)
    for count in plan.rows:
        for context in plan.contexts:
            grouped = SlotCache(config, count, context + 1, dtype)
            grouped.kv.normal_(generator=torch.Generator().manual_seed(0))
            before = RepeatedHeads(model)
            repeated = SlotCache(before.config, count, context + 1, dtype)
            group = config.n_head // config.n_kv_head
            repeated.kv.copy_(grouped.kv.repeat_interleave(group, 3))
            ids, shares = list(range(count)), [(row, context, 1) for row in range(count)]
            ways = {
                REPEATED: partial(Runner(before, repeated).run, ids, shares, ids),
                GROUPED: partial(Runner(subject.model, grouped).run, ids, shares, ids),
            }
            proof = kit.prove(ways[REPEATED]().float(), ways[GROUPED]().argmax(-1), dtype)
            yield {
                **subject.about,
                "count": count,
                "context": context,
                "bytes": {REPEATED: repeated.bytes, GROUPED: grouped.bytes},
                "seconds": measure.alternate(ways, plan.repeats),
                "proof": proof,
            }


@torch.inference_mode()
def pieces(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """What is new in a layer, in eager PyTorch, beside GPT-2's LayerNorm and beside the layer's
    matrices."""
    config = subject.config
    assert isinstance(config, LlamaConfig)
    width, inner = config.n_embd, config.n_inner
    rms = RMSNorm(width, 1e-5).to(subject.dtype)
    layer = nn.LayerNorm(width).to(subject.dtype)
    nn.init.ones_(rms.weight)
    gate = nn.Linear(width, inner, bias=False).to(subject.dtype)
    turns = frequencies(config.rope, config.head_dim)
    for count in plan.tokens:
        x = torch.randn(count, width, generator=torch.Generator().manual_seed(0)).to(subject.dtype)
        q = x.unflatten(-1, (config.n_head, -1))
        cos, sin = rotation(torch.arange(count), turns)
        ways = {
            "LayerNorm": partial(layer, x),
            "RMSNorm": partial(rms, x),
            "rotation of the queries": partial(rotate, q, cos, sin),
            "one matrix of the MLP": partial(gate, x),
        }
        seconds = measure.alternate(ways, plan.piece_repeats)
        yield {**subject.about, "count": count, "seconds": seconds}


def whole(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """One request on stage 02's engine: a prompt, and an answer."""
    for lengths in plan.lengths:
        engine = {"ours": Engine(subject.model)}
        yield kit.compare(subject, engine, [lengths], plan.whole_repeats)[0]


def real(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Peak memory of a process that runs a model of today's size with random bfloat16 weights."""
    options = ["--random-weights", "--dtype", "bfloat16", "--linear", "plain"]
    options += ["--prompt-ids", "1,2,3", "--max-tokens", "8"]
    for name in (QWEN,) if plan.real else ():
        empty = measure.peak_memory("stage02_kv_cache", ["--model", "tiny", *options])
        peak = measure.peak_memory("stage02_kv_cache", ["--model", name, *options])
        yield {"model": name, "bytes": peak - empty}


# ---- tables and charts --------------------------------------------------------------------------


def least(row: Row) -> float:
    """Seconds of a decode step by bytes and operations."""
    bytes_read = row["bytes"]
    cost = forward_cost(row.config, row.kind, 1, 0, rows=row["count"])
    return max(
        (cost.bytes + bytes_read) / row.bandwidth, cost.seconds(row.results.limits, row.kind)
    )


def piece(name: str) -> rows.Column:
    return lambda row: f"{row.of(name).median * 1e6:,.0f}"


def published() -> Iterator[dict[str, str]]:
    """By arithmetic: what models of today need."""
    for name, config in PRESETS.items():
        count, two = config.parameter_count, torch.bfloat16
        yield {
            "model": name,
            "parameters": f"{count / 1e6:,.0f} M",
            "float32, GB": f"{count * 4 / 1e9:.1f}",
            "bfloat16, GB": f"{count * 2 / 1e9:.1f}",
            "keys and values a token, KiB": f"{config.kv_bytes_per_token(two) / 1024:,.1f}",
        }


def models_table(results: Results) -> list[dict[str, str]]:
    """`published`, with the tokens a second that this machine's bandwidth allows one request."""
    lines = []
    for line, config in zip(published(), PRESETS.values(), strict=True):
        cost = forward_cost(config, torch.bfloat16, 1)
        speed = results.limits.bandwidth_gb_s * 1e9 / cost.bytes
        lines.append(line | {"bfloat16, at most tok/s here": f"{speed:,.0f}"})
    return lines


def memory_table(results: Results) -> list[dict[str, str]]:
    lines = []
    for row in results.groups("real"):
        config = PRESETS[row["model"]]
        context = config.n_positions * config.kv_bytes_per_token(torch.bfloat16)
        weights = config.parameter_count * 2
        lines.append(
            {
                "model": row["model"],
                "weights, GB": f"{weights / 1e9:.2f}",
                "cache of a whole context, GB": f"{context / 1e9:.2f}",
                "predicted, GB": f"{(weights + context) / 1e9:.2f}",
                "peak over a tiny model's, GB": f"{row['bytes'] / 1e9:.2f}",
            }
        )
    return lines


COLUMNS: dict[str, rows.Column] = {
    "rows": "count",
    "tokens": "count",
    "context": "context:,",
    "repeated, ms": rows.ms(REPEATED),
    "grouped, ms": rows.ms(GROUPED),
    "gain (predicted)": rows.gain(REPEATED, least, GROUPED),
    "cache, repeated and grouped, MB": lambda row: (
        f"{row.of(REPEATED)['bytes'] / 1e6:,.1f}, {row.of(GROUPED)['bytes'] / 1e6:,.1f}"
    ),
    "LayerNorm, us": piece("LayerNorm"),
    "RMSNorm, us": piece("RMSNorm"),
    "rotation of q, us": piece("rotation of the queries"),
    "a matrix of the MLP, us": piece("one matrix of the MLP"),
    "prompt": lambda row: row.lengths[0][0],
    "answer": "tokens",
    "limit, tok/s": lambda row: (
        f"{row.tokens / row.least(static_costs(row.config, row.kind, row.lengths)):,.1f}"
    ),
}
TABLES = rows.tables(
    COLUMNS,
    """
    heads: dtype | rows | context | repeated, ms | grouped, ms | gain (predicted)
      | cache, repeated and grouped, MB | same tokens
    few < in_float32: rows | context | repeated, ms | grouped, ms | gain (predicted)
    pieces: dtype | tokens | LayerNorm, us | RMSNorm, us | rotation of q, us
      | a matrix of the MLP, us
    whole < wholes: model | dtype | prompt | answer | tok/s | limit, tok/s | same tokens
    """,
    wholes=lambda results: results.rows("whole"),
    in_float32=lambda results: results.groups("heads", dtype="float32"),
    published=models_table,
    memory=memory_table,
)


def heads_chart(results: Results) -> Figure:
    found = results.groups("heads", dtype="float32")
    most = max(row["context"] for row in found)
    found = [row for row in found if row["context"] == most]
    series = {name: [row.of(name).median * 1e3 for row in found] for name in (REPEATED, GROUPED)}
    groups = [f"{row['count']} row{'s' if row['count'] > 1 else ''}" for row in found]
    title = f"Shared keys are read once: a decode step at {most:,} tokens of context"
    return charts.bars(title, "milliseconds (SmolLM2-135M shape, float32)", groups, series)


def headline(results: Results) -> str:
    row = results.groups("heads", dtype="float32")[-1]
    gain = row.of(REPEATED).median / row.of(GROUPED).median
    return (
        f"{row['count']} rows at {row['context']:,} tokens: a third of the cache, and {gain:.1f}x "
        "the tok/s of repeated keys (SmolLM2-135M shape, float32)"
    )


ABOUT = "Measures the Llama family on this CPU: grouped heads, rotary positions, RMSNorm."
WORK = kit.cases(Case(heads), Case(pieces), Case(whole, models=None), Case(real, dtypes=1))
CHARTS = {"heads": heads_chart}
BENCHMARK = kit.Benchmark(STAGE, ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
