"""Measures what each kernel buys, in decode steps and a prompt: stage 05 with packed layers, stage
05 with attention in place, and the whole pass as one call. Then the same call with each technique
taken away. Every pass is proved by stage 05's logits in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from shared import charts, cli, kit, models
from shared.kit import BLOCK, Results, Row, Subject
from stage04_continuous.runner import Runner
from stage05_paged.cache import PagedCache

from . import library
from .cache import KernelCache
from .runner import KernelRunner

PAGED, ATTENTION, KERNELS = "paged", "attention in place", "one call"
ALL = "with"  # all techniques
PROMPT = 512
PAIRS, TILES = "bfloat16 products in pairs", "bfloat16 products by tiles (AMX)"
PREFETCH = "prefetch of the next block of a cache"  # in bfloat16 alone
CONSTANTS = {  # what takes a technique away, and nothing else
    "a register tile of 6 rows": ("MR=1",),
    "weights in pieces that stay in L1": ("KC=1048576",),
    "8 queries share their keys": ("MAX_QUERIES=1",),
    "4 vectors of keys at a time": ("UNROLL=1",),
    PREFETCH: ("PREFETCH=0",),
    "prefetch of the next weights": ("LINEAR_PREFETCH=0",),
}
LEVELS = {TILES: ("amx", "avx512_bf16"), PAIRS: ("avx512_bf16", "avx512")}  # with, without
STARTED = 150 * 7.5e-6  # seconds to start the operators of a step, as the lesson counts them


def filled(subject: Subject, blocks: int) -> tuple[PagedCache, KernelCache]:
    """Both caches with the same random numbers."""
    config, dtype = subject.config, subject.dtype
    paged = PagedCache(config, blocks, BLOCK, dtype=dtype)
    kernel = KernelCache(config, blocks, BLOCK, dtype=dtype)
    paged.kv.normal_(generator=torch.Generator().manual_seed(0))
    pairs = 2 if dtype == torch.bfloat16 else 1  # rows of keys that are interleaved
    for layer in range(config.n_layer):
        keys, values = paged.kv[layer]  # each (H, blocks, block, D)
        turned = keys.transpose(2, 3).unflatten(2, (-1, pairs)).transpose(3, 4)
        kernel.kv[layer] = torch.cat((turned.flatten(2), values.flatten(2)), 2).transpose(0, 1)
    return paged, kernel


def passes(bench: kit.Bench) -> Iterator[tuple[int, int, Any]]:
    """Rows, tokens of context and inputs of each pass; no context: a prompt."""
    decode = bench.sizes((1, 256), (8, 256), (32, 256), (32, 1000))
    for count, context in (*decode, (PROMPT, 0)):
        yield count, context, kit.inputs(count, context)


def measure(bench: kit.Bench) -> None:
    blocks = PROMPT // BLOCK if bench.quick else 32 * -(-1001 // BLOCK)
    for subject in bench.subjects(("gpt2", "float32"), ("gpt2", "bfloat16")):
        plain = models.load_model(subject.shape, "cpu", subject.dtype)
        paged, kernel = filled(subject, blocks)
        steps(bench, subject, plain, paged, kernel)
        techniques(bench, subject, plain, kernel)


def steps(bench: kit.Bench, subject: Subject, plain: Any, paged: Any, kernel: Any) -> None:
    exact = PagedCache(subject.config, paged.blocks, BLOCK)
    exact.kv.copy_(paged.kv)
    judge = Runner(models.load_model(subject.shape, "cpu", subject.dtype).float(), exact)
    runners: dict[str, Any] = {
        PAGED: Runner(subject.model, paged),
        ATTENTION: Runner(subject.model, kernel),
        KERNELS: KernelRunner(plain, kernel),
    }
    for count, context, inputs in passes(bench):
        ways = {name: partial(runner.run, *inputs) for name, runner in runners.items()}
        logits = judge.run(*inputs)
        proofs = [kit.prove(logits, way().argmax(-1), subject.dtype) for way in ways.values()]
        about = {**subject.about, "rows": count, "context": context}
        bench.row("steps", ways, prove=partial(kit.together, proofs), **about)


def techniques(bench: kit.Bench, subject: Subject, plain: Any, kernel: KernelCache) -> None:
    """A pass with all techniques, and with each of them taken away."""
    half, best = subject.dtype == torch.bfloat16, library.levels()[0]
    ways: dict[str, tuple[tuple[str, ...], str]] = {ALL: ((), "")}
    ways |= {name: (taken, "") for name, taken in CONSTANTS.items() if half or name != PREFETCH}
    ways |= {name: ((), low) for name, (high, low) in LEVELS.items() if half and best == high}
    runners = {}
    for name, (kernel.defines, kernel.level) in ways.items():
        runners[name] = KernelRunner(plain, kernel)
    kernel.defines, kernel.level = (), ""
    for count, context, inputs in passes(bench):
        if count == 32 or not context:
            runs = {name: partial(runner.run, *inputs) for name, runner in runners.items()}
            bench.row("techniques", runs, **subject.about, rows=count, context=context)


# ---- tables and chart ---------------------------------------------------------------------------


def bound(row: Row) -> float:
    """The least seconds that a pass can take."""
    new, count = (1, row["rows"]) if row["context"] else (row["rows"], 1)
    return row.bound(new, row["context"], count)


def gathering(row: Row) -> float:
    """The same for stage 05: with what it copies, and the start of its operators."""
    copied = 2 * row["rows"] * row["context"] * row.config.kv_bytes_per_token(row.kind)
    return bound(row) + copied / row.limits["memory"] / 1e9 + STARTED


def name_of(row: Row) -> str:
    return f"{row['rows']} at {row['context']:,}" if row["context"] else f"prompt of {row['rows']}"


def tables(results: Results) -> kit.Tables:
    steps = [
        {
            "dtype": row["dtype"], "rows, context": name_of(row), "paged, ms": row.ms(PAGED),
            "attention in place, ms": row.ms(ATTENTION), "one call, ms": row.ms(KERNELS),
            "together": f"{row.gain(PAGED, KERNELS):.2f}x",
            "of the bound": f"{bound(row) / row.median(KERNELS):.0%}", "same tokens": row.proof,
        }
        for row in results.rows("steps")
    ]  # fmt: skip
    shown = ("rows, context", "paged, ms", "one call, ms", "together", "of the bound")
    few = [{name: line[name] for name in shown} for line in steps if line["dtype"] == "float32"]
    return {"steps": steps, "few": few, "gains": gains(results), "claims": claims(results)}


def gains(results: Results) -> list[dict[str, str]]:
    lines = {}
    for technique in (*CONSTANTS, *LEVELS):
        lines[technique] = {"technique": technique, "float32": "", "bfloat16": ""}
        for dtype in ("float32", "bfloat16"):
            rows = [r for r in results.rows("techniques", dtype=dtype) if technique in r["seconds"]]
            if rows:
                best = max(rows, key=lambda row: row.gain(technique, ALL))
                lines[technique][dtype] = f"{best.gain(technique, ALL):.2f}x, {name_of(best)}"
    return [line for line in lines.values() if line["float32"] or line["bfloat16"]]


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts, for the GPT-2 124M shape and 256 tokens of context."""
    by_hand = {
        ("float32", 1): (1.16, 12.8), ("float32", 32): (1.76, 41.0), ("bfloat16", 1): (1.25, 6.41),
        ("float32", PROMPT): (1.0, 459),
    }  # fmt: skip
    slow = "most of it comes from the one call, not from attention in place"
    for row in results.rows("steps", model="gpt2"):
        key = row["dtype"], row["rows"]
        if key in by_hand and row["context"] in (0, 256):
            what = f"{name_of(row)}, {row['dtype']}"
            here = (gathering(row) if row["context"] else bound(row)) / bound(row)
            gain, why = row.gain(PAGED, KERNELS), slow if key == ("float32", 1) else "not known"
            yield kit.claim(f"gain: {what}", by_hand[key][0], here, gain, "x", why)
            taken = 1e3 * row.median(KERNELS)
            yield kit.claim(f"a pass: {what}", by_hand[key][1], 1e3 * bound(row), taken, "ms")


def chart(results: Results) -> charts.Figure:
    rows = [row for row in results.rows("steps", dtype="float32") if row["context"] == 256]
    drawn = {name: [1e3 * row.median(name) for row in rows] for name in (PAGED, ATTENTION, KERNELS)}
    return charts.bars(
        "A decode step: attention in place, then all of it in one call",
        "milliseconds (GPT-2 124M shape, float32, 256 tokens of context)",
        ["1 row" if row["rows"] == 1 else f"{row['rows']} rows" for row in rows],
        drawn | {"machine's limit": [1e3 * bound(row) for row in rows]},
    )


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("steps", dtype="float32", rows=32):
        yield f"{row.gain(PAGED, KERNELS):.1f}x stage 05's decode step with {row['rows']} rows"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage09_kernels", __doc__, measure, tables))
