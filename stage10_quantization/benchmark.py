"""What fewer bytes buy: `python -m stage10_quantization.benchmark`.

Decode steps and a prompt with weights in five formats, and with weights whose activations are not
rounded; keys and values in two formats; what the formats cost in quality. Every format is proved by
the slow layers of the same quantized model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from shared import charts, cli, kit, models
from shared.conversion import convert
from shared.kit import BLOCK, Results, Row, Subject
from shared.roofline import Cost, block_weights, forward_cost
from stage04_continuous.runner import Runner
from stage05_paged.cache import PagedCache
from stage09_kernels.cache import KernelCache
from stage09_kernels.runner import KernelRunner

from . import quality
from .cache import Int8KernelCache
from .convert import Quantize

PROMPT, CONTEXT = 512, 256  # tokens
F32, BF16, INT8, GROUPS, INT4 = "float32", "bfloat16", "int8", "int8-g32", "int4"
ONLY = "int8, weights only"  # activations are not rounded
# Of a weight in the layers, with the scales and minimums of its group; a table has GROUPS at least.
BITS = {F32: 32, BF16: 16, INT8: 8, GROUPS: 8.5, INT4: 5, ONLY: 8}
KEYS = dict.fromkeys(BITS, BF16) | {F32: F32}  # the format of keys and values beside such weights


def model_of(subject: Subject, weights: str) -> Any:
    model = models.load_model(subject.shape, dtype=getattr(torch, BF16 if weights == BF16 else F32))
    if weights not in (F32, BF16):
        convert(model, Quantize(INT8, "float") if weights == ONLY else Quantize(weights))
    return model


def runner_of(subject: Subject, weights: str, keys: str, rows: int, context: int) -> KernelRunner:
    make: Any = partial(Int8KernelCache, real=torch.float32) if keys == INT8 else KernelCache
    blocks = rows * -(-(context + 1) // BLOCK)
    cache = make(subject.config, blocks, dtype=getattr(torch, keys))
    cache.kv.view(torch.int8).fill_(60)  # so that it is in memory: 0.0115 in both dtypes
    return KernelRunner(model_of(subject, weights), cache, release=True)


def proof_of(subject: Subject, weights: str, runner: KernelRunner) -> dict[str, Any]:
    """The kernels' next token of a prompt is that of the slow layers of the same model. Another
    last bit before a code is rounded makes another code, so near ties are those of 8 bits."""
    judge = Runner(model_of(subject, weights).float(), PagedCache(subject.config, 2, BLOCK))
    dtype, inputs = getattr(torch, KEYS[weights]), kit.inputs(32, 0)
    return kit.prove(judge.run(*inputs), runner.run(*inputs).argmax(-1), dtype)


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", F32), ("stories", F32)):
        whole = subject.about["model"] == "gpt2" or bench.quick
        runners = {w: runner_of(subject, w, keys, 64, CONTEXT) for w, keys in KEYS.items()}
        proofs = [proof_of(subject, weights, run) for weights, run in runners.items()]
        about = {**subject.about, "bytes": {w: run.program.bytes for w, run in runners.items()}}
        for count in bench.sizes(1, 8, 32, 64, PROMPT) if whole else (1,):
            about |= {"rows": count, "context": 0 if count == PROMPT else CONTEXT}
            inputs = kit.inputs(count, about["context"])
            ways = {weights: partial(run.run, *inputs) for weights, run in runners.items()}
            bench.row("steps", ways, 4, 1, partial(kit.together, proofs), **about)
        for context in bench.sizes(64, 1000) if whole else ():
            runners = {keys: runner_of(subject, INT8, keys, 32, context) for keys in (BF16, INT8)}
            inputs = kit.inputs(32, context)
            ways = {keys: partial(run.run, *inputs) for keys, run in runners.items()}
            bench.row("caches", ways, 4, **subject.about, rows=32, context=context)
    bench.results["quality"] = [] if bench.quick else [*quality.losses(8, 16)]


def bound(row: Row, weights: str, keys: str = "") -> float:
    """The least seconds of a pass. Bytes are multiplied twice as fast as bfloat16's numbers;
    without rounded activations they are widened to float32."""
    config, dtype = row.config, getattr(torch, keys or KEYS[weights])
    new, count = (1, row["rows"]) if row["context"] else (row["rows"], 1)
    whole, table = 8 * dtype.itemsize, max(BITS[weights], BITS[GROUPS])
    saved = block_weights(config) * (whole - BITS[weights])
    saved += config.vocab_size * config.n_embd * (whole - table)
    cost = forward_cost(config, dtype, new, row["context"], rows=count)
    rate = row.limits[F32 if weights in (F32, ONLY) else BF16]
    limits = {**row.limits, F32: rate * (2 if weights in (INT8, GROUPS, INT4) else 1)}
    return Cost(cost.flops, cost.bytes - saved / 8).seconds(limits, torch.float32)


def name_of(row: Row) -> str:
    decode = f"decode, {row['rows']} row{'s' if row['rows'] > 1 else ''}"
    return decode if row["context"] else f"prompt of {row['rows']}"


def tables(results: Results) -> kit.Tables:
    steps = [
        {"model": row["model"], "pass": name_of(row)}
        | {f"{weights}, ms": row.ms(weights) for weights in BITS}
        | {"same tokens": row.proof}
        for row in results.rows("steps")
    ]
    lost = map(quality.line, results.rows("quality"))
    return {"steps": steps, "quality": lost, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts for the GPT-2 124M shape, and for the embedded model's."""
    by_hand = {(1, INT8): 1.89, (1, INT4): 2.48, (32, INT8): 1.92, (PROMPT, ONLY): 0.5}
    tiles = {32: "by tiles, bfloat16 is not bound by arithmetic", PROMPT: "bfloat16 takes tiles"}
    for row in results.rows("steps", model="gpt2", rows=1):
        for weights, share in ((INT8, 0.26), (INT4, 0.19)):
            what = f"bytes of {weights} weights, of float32's"
            read = row["bytes"][weights] / row["bytes"][F32]
            yield kit.claim(what, share, share, read, "x", "counted")
    for (rows, weights), expected in by_hand.items():
        for row in results.rows("steps", model="gpt2", rows=rows):
            here, what = bound(row, BF16) / bound(row, weights), f"{weights} over bfloat16"
            what, gain = f"{what}, {name_of(row)}", row.gain(BF16, weights)
            yield kit.claim(what, expected, here, gain, why=tiles.get(rows, "not known"))
    for row in results.rows("steps", model="stories"):
        yield kit.claim("int8 over bfloat16, stories", 1.0, 1.0, row.gain(BF16, INT8))
    for row in results.rows("caches", model="gpt2"):
        here, context = bound(row, INT8, BF16) / bound(row, INT8, INT8), row["context"]
        what = f"keys in int8 over bfloat16, 32 rows at {context:,}"
        yield kit.claim(what, {1000: 1.78}.get(context, 1.0), here, row.gain(BF16, INT8))
    for row in results.rows("quality", rounded=INT8):
        what = f"KL of int8 in thousandths of a nat, {row['model']} (an aim)"
        why = "outliers in the layers' inputs" if row["model"] == "smollm2" else "not known"
        yield kit.claim(what, 0.3, 0.3, 1e3 * row["kl"], "", why)


def chart(results: Results) -> charts.Figure:
    rows = [row for row in results.rows("steps", model="gpt2") if row["context"]]
    title = "Fewer bytes, more tokens: decode by the format of the weights"
    about = "tokens a second (GPT-2 124M shape, 256 tokens of context)"
    rates = {w: [row["rows"] / row.median(w) for row in rows] for w in (F32, BF16, INT8, INT4)}
    return charts.bars(title, about, [*map(name_of, rows)], rates, digits=0)


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("steps", model="gpt2", rows=1):
        fast = f"int8 {row.gain(BF16, INT8):.1f}x and int4 {row.gain(BF16, INT4):.1f}x"
        yield f"decode of one row: {fast} as fast as bfloat16"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage10_quantization", __doc__, measure, tables))
