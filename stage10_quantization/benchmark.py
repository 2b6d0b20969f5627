"""Measures what fewer bytes buy: `python -m stage10_quantization.benchmark`.

A decode step and a prompt with weights in five formats, keys and values in three, weights without
rounded activations, and bytes in memory. Every format is checked against the slow layers of the
same quantized model. What it costs in words: `losses.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure

from shared import charts, cli, linear, measure, models
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row
from shared.roofline import Cost, block_weights
from stage04_continuous.runner import Runner
from stage05_paged.cache import PagedCache
from stage09_kernels.cache import KernelCache
from stage09_kernels.runner import KernelRunner

from .cache import Int8KernelCache
from .convert import Quantize

BLOCK = 16
F32, BF16, INT8, GROUPS, INT4 = "float32", "bfloat16", "int8", "int8-g32", "int4"
FORMATS = (F32, BF16, INT8, GROUPS, INT4)
CACHES = (F32, BF16, INT8)
# Of a weight in the layers, with the scales and minimums of its group; a table has GROUPS at least.
BITS = {F32: 32, BF16: 16, INT8: 8, GROUPS: 8.5, INT4: 5}
WEIGHT_ONLY = "weights only"
FULL = kit.plan(
    models=("gpt2", "stories"), dtypes=(F32,), repeats=7,
    rows=(1, 8, 32, 64), context=256, prompt=512,
    lengths=(64, 256, 1000), crowd=32,  # contexts and rows for the caches
)  # fmt: skip
FEW = {"rows": (1, 8), "lengths": (64, 256)}


# ---- measurements -------------------------------------------------------------------------------


def model_of(subject: Subject, weights: str, activations: str = "int8") -> Any:
    dtype = torch.bfloat16 if weights == BF16 else torch.float32
    model = models.load_model(subject.shape, dtype=dtype)
    if weights in (INT8, GROUPS, INT4):
        linear.convert(model, Quantize(weights, activations), {})
    return model


def cache_of(subject: Subject, kind: str, blocks: int) -> Any:
    if kind == INT8:
        return Int8KernelCache(subject.config, blocks, BLOCK)
    cache = KernelCache(subject.config, blocks, BLOCK, dtype=getattr(torch, kind))
    cache.kv.normal_(generator=torch.Generator().manual_seed(0))
    return cache


def runner_of(subject: Subject, weights: str, blocks: int, kind: str = "", **how: Any) -> Any:
    """A runner whose weights are in the format `weights`, and whose cache is of `kind`: float32
    beside weights in float32, otherwise bfloat16 unless it is given."""
    cache = cache_of(subject, kind or (F32 if weights == F32 else BF16), blocks)
    return KernelRunner(model_of(subject, weights, **how), cache, release=True)


def prompt_pass(subject: Subject, count: int) -> tuple[list[int], list[Any], list[int]]:
    (ids,) = subject.prompts([count], "prefill")
    return ids, [(list(range(-(-count // BLOCK))), 0, count)], [count - 1]


def decode_pass(count: int, context: int) -> tuple[list[int], list[Any], list[int]]:
    """A decode step of `count` sequences, in blocks anywhere."""
    size = -(-(context + 1) // BLOCK)
    order = torch.randperm(count * size, generator=torch.Generator().manual_seed(0)).tolist()
    shares = [(order[row * size : (row + 1) * size], context, 1) for row in range(count)]
    return [7] * count, shares, list(range(count))


def proof_of(subject: Subject, weights: str, runner: Any) -> dict[str, Any]:
    """The kernels' next token of a prompt is that of the slow layers of the same model. Another
    last bit before a code is rounded makes another code, so near ties are those of 8 bits."""
    inputs = prompt_pass(subject, 32)
    judge = Runner(model_of(subject, weights).float(), PagedCache(subject.config, 2, BLOCK))
    dtype = torch.float32 if weights == F32 else torch.bfloat16
    return kit.prove(judge.run(*inputs), runner.run(*inputs).argmax(-1), dtype)


def steps(subject: Subject, plan: Any) -> Iterator[Group]:
    """A decode step of some rows, and a prompt: the weights in each format."""
    blocks = max(plan.rows) * -(-(plan.context + 1) // BLOCK)
    runners = {weights: runner_of(subject, weights, blocks) for weights in FORMATS}
    proofs = {weights: proof_of(subject, weights, run) for weights, run in runners.items()}
    passes = [(count, plan.context, decode_pass(count, plan.context)) for count in plan.rows]
    passes.append((plan.prompt, 0, prompt_pass(subject, plan.prompt)))
    for count, context, inputs in passes:
        ways = {weights: partial(run.run, *inputs) for weights, run in runners.items()}
        taken = measure.alternate(ways, plan.repeats)
        yield {"count": count, "context": context, "seconds": taken, "proof": proofs}


def weight_only(subject: Subject, plan: Any) -> Iterator[Group]:
    """int8 weights with activations rounded to int8, and as they are."""
    blocks = max(plan.rows) * -(-(plan.context + 1) // BLOCK)
    runners = {weights: runner_of(subject, weights, blocks) for weights in (BF16, INT8)}
    runners[WEIGHT_ONLY] = runner_of(subject, INT8, blocks, activations="float")
    for count in (*plan.rows, plan.prompt):
        context = 0 if count == plan.prompt else plan.context
        inputs = decode_pass(count, context) if context else prompt_pass(subject, count)
        ways = {name: partial(run.run, *inputs) for name, run in runners.items()}
        seconds = measure.alternate(ways, plan.repeats)
        yield {"count": count, "context": context, "seconds": seconds}


def caches(subject: Subject, plan: Any) -> Iterator[Group]:
    """A decode step with int8 weights, keys and values in each format."""
    blocks = plan.crowd * -(-(max(plan.lengths) + 1) // BLOCK)
    runners = {kind: runner_of(subject, INT8, blocks, kind) for kind in CACHES}
    for count, context in product((1, plan.crowd), plan.lengths):
        inputs = decode_pass(count, context)
        ways = {kind: partial(run.run, *inputs) for kind, run in runners.items()}
        seconds = measure.alternate(ways, plan.repeats)
        size = {kind: run.cache.bytes / blocks / BLOCK for kind, run in runners.items()}
        yield {"count": count, "context": context, "seconds": seconds, "token_bytes": size}


def weight_bytes(subject: Subject, plan: Any) -> Iterator[Group]:
    """What a pass reads of the weights."""
    for weights in FORMATS:
        yield {"weights": weights, "bytes": runner_of(subject, weights, 1).program.bytes}


# ---- tables and charts --------------------------------------------------------------------------


def cost(row: Row, weights: str, keys: str = "") -> Cost:
    """What a pass must read and compute, with weights and cache in these formats; "": the cache
    that the weights have in `runner_of`."""
    config, keys = row.config, keys or (F32 if weights == F32 else BF16)
    new = 1 if row["context"] else row["count"]
    count, context = (row["count"], row["context"]) if row["context"] else (1, 0)
    head, head_bits = config.vocab_size * config.n_embd, max(BITS[weights], BITS[GROUPS])
    read = (block_weights(config) * BITS[weights] + head * head_bits) / 8
    cached = config.kv_bytes_per_token(getattr(torch, keys))
    seen = count * (new * context + new * (new + 1) / 2)
    flops = 2.0 * block_weights(config) * count * new + 2 * head * count
    flops += 4 * config.n_head * config.head_dim * config.n_layer * seen
    return Cost(flops, read + count * context * cached)


def bound(row: Row, weights: str, keys: str = "") -> float:
    """The least seconds of a pass. Bytes are multiplied twice as fast as bfloat16's numbers;
    without rounded activations they are widened to float32."""
    rates = row.limits.gflops
    rate = rates[F32] if weights in (F32, WEIGHT_ONLY) else rates.get(BF16, rates[F32])
    rate *= 2 if weights in (INT8, GROUPS, INT4) else 1
    read = INT8 if weights == WEIGHT_ONLY else weights
    return cost(row, read, keys).seconds(replace(row.limits, gflops={F32: rate}), torch.float32)


def of_bound(weights: str) -> rows.Column:
    return lambda row: f"{bound(row, weights) / row.of(weights).median:.0%}"


def gpt2(case: str, **where: Any) -> Any:
    return lambda results: results.groups(case, model="gpt2", **where)


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts for the GPT-2 124M shape, and for the embedded model's."""
    sizes = {row["weights"]: row["bytes"] for row in results.groups("weight_bytes", model="gpt2")}
    for weights, share in ((INT8, 0.26), (INT4, 0.19)):
        what = f"bytes of {weights} weights, of float32's"
        yield Claim(what, share, sizes[weights] / sizes[F32], "x", "panels are padded")
    for count, weights in ((1, INT8), (1, INT4), (32, INT8)):
        for row in decode(results, "steps", "gpt2", count):
            what = f"{weights} over bfloat16, {kit.counted(count, 'row')}"
            predicted = bound(row, BF16) / bound(row, weights)
            why = reached(row, {name: bound(row, name) for name in (BF16, weights)})
            yield Claim(what, predicted, row.gain(BF16, weights), "x", why)
    for row in decode(results, "steps", "stories", 1):
        yield Claim("int8 over bfloat16, stories", 1.0, row.gain(BF16, INT8), "x", "not known")
    for row in decode(results, "caches", "gpt2", results.plan["crowd"])[-1:]:
        what = f"keys in int8 over bfloat16, {row['count']} rows at {row['context']:,}"
        least = {keys: bound(row, INT8, keys) for keys in (BF16, INT8)}
        gained = row.gain(BF16, INT8)
        yield Claim(what, least[BF16] / least[INT8], gained, "x", reached(row, least))
    for row in results.groups("weight_only", model="gpt2", context=0):
        what = f"weights only over bfloat16, a prompt of {row['count']}"
        least = {name: bound(row, name) for name in (BF16, WEIGHT_ONLY)}
        gained = row.gain(BF16, WEIGHT_ONLY)
        yield Claim(what, least[BF16] / least[WEIGHT_ONLY], gained, "x", reached(row, least))


def reached(row: Row, least: dict[str, float]) -> str:
    """The share of its bound that each variant reaches, by its least seconds."""
    shares = (f"{name} {least[name] / row.of(name).median:.0%}" for name in least)
    return f"of their bounds: {', '.join(shares)}"


def decode(results: Results, case: str, model: str, count: int) -> list[Row]:
    """The decode steps of a case."""
    return [row for row in results.groups(case, model=model, count=count) if row["context"]]


COLUMNS: dict[str, rows.Column] = {
    "pass": lambda row: (
        f"decode, {kit.counted(row['count'], 'row')}"
        if row["context"]
        else f"prompt of {row['count']}"
    ),
    "rows": "count",
    "int8 over bfloat16": rows.gain(BF16, variant=INT8),
    "int4 over bfloat16": rows.gain(BF16, variant=INT4),
    "int8-g32 over int8": rows.gain(INT8, variant=GROUPS),
    "of the bound, int8": of_bound(INT8),
    "of the bound, int4": of_bound(INT4),
    "of the bound, float32": of_bound(F32),
    "of the bound, bfloat16": of_bound(BF16),
    "bytes a token": lambda row: " / ".join(
        f"{row.of(kind)['token_bytes']:,.0f}" for kind in CACHES
    ),
    "int8 over bfloat16 keys": rows.gain(BF16, variant=INT8),
    "MB": "bytes * 1e-6:,.0f",
    "weights only over bfloat16": rows.gain(BF16, variant=WEIGHT_ONLY),
}
TABLES = rows.tables(
    COLUMNS,
    f"""
    steps < main: pass | {F32}, ms | {BF16}, ms | {INT8}, ms | {INT4}, ms
      | int8 over bfloat16 | int4 over bfloat16
    few < main: pass | {BF16}, ms | {INT8}, ms | {INT4}, ms | int8 over bfloat16
      | int4 over bfloat16
    groups < grouped: pass | {INT8}, ms | {GROUPS}, ms | int8-g32 over int8
    bounds < main: pass | of the bound, float32 | of the bound, bfloat16 | of the bound, int8
      | of the bound, int4 | same tokens
    small < small: pass | {F32}, ms | {BF16}, ms | {INT8}, ms | {INT4}, ms | int8 over bfloat16
    caches < cached: rows | context | {F32}, ms | {BF16}, ms | {INT8}, ms | int8 over bfloat16 keys
    only < only: pass | {BF16}, ms | {INT8}, ms | {WEIGHT_ONLY}, ms | weights only over bfloat16
    bytes < bytes: weights | MB
    """,
    main=gpt2("steps"),
    grouped=lambda results: [row for row in gpt2("steps")(results) if GROUPS in row["seconds"]],
    small=lambda results: results.groups("steps", model="stories"),
    cached=gpt2("caches"),
    only=gpt2("weight_only"),
    bytes=gpt2("weight_bytes"),
    claims=closing(claims),
)


def steps_chart(results: Results) -> Figure:
    groups = [row for row in results.groups("steps", model="gpt2") if row["context"]]
    rate = {
        weights: [row["count"] / row.of(weights).median for row in groups]
        for weights in FORMATS
        if all(weights in row["seconds"] for row in groups)
    }
    return charts.bars(
        "Fewer bytes, more tokens: decode by the format of the weights",
        "tokens a second (GPT-2 124M shape)",
        [kit.counted(row["count"], "row") for row in groups],
        rate,
    )


def headline(results: Results) -> str:
    (row,) = results.groups("steps", model="gpt2", count=1)
    return (
        f"decode of one row: int8 {row.gain(BF16, INT8):.1f}x and int4 "
        f"{row.gain(BF16, INT4):.1f}x as fast as bfloat16 (GPT-2 124M shape)"
    )


CHARTS = {"steps": steps_chart}
WORK = kit.cases(Case(steps, models=None), Case(weight_only), Case(caches), Case(weight_bytes))
BENCHMARK = kit.Benchmark(
    "stage10_quantization", __doc__, FULL, WORK, TABLES, CHARTS, headline, FEW
)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
