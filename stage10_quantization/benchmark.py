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
from matplotlib.figure import Figure

from shared import charts, cli, kit, models
from shared.conversion import convert
from shared.kit import Results, Row, Subject
from shared.roofline import Cost, block_weights, forward_cost
from stage04_continuous.runner import Runner
from stage05_paged.cache import PagedCache
from stage09_kernels.cache import KernelCache
from stage09_kernels.runner import KernelRunner

from . import quality
from .cache import Int8KernelCache
from .convert import Quantize

BLOCK, PROMPT, CONTEXT = 16, 512, 256  # tokens
F32, BF16, INT8, GROUPS, INT4 = "float32", "bfloat16", "int8", "int8-g32", "int4"
ONLY = "int8, weights only"  # activations are not rounded
FORMATS = (F32, BF16, INT8, GROUPS, INT4, ONLY)
# Of a weight in the layers, with the scales and minimums of its group; a table has GROUPS at least.
BITS = {F32: 32, BF16: 16, INT8: 8, GROUPS: 8.5, INT4: 5, ONLY: 8}


def model_of(subject: Subject, weights: str) -> Any:
    dtype = torch.bfloat16 if weights == BF16 else torch.float32
    model = models.load_model(subject.shape, torch.device("cpu"), dtype)
    if weights not in (F32, BF16):
        convert(model, Quantize(INT8, "float") if weights == ONLY else Quantize(weights))
    return model


def runner_of(subject: Subject, weights: str, blocks: int, kind: str = "") -> KernelRunner:
    """kind: of keys and values; by default float32 beside such weights, else bfloat16."""
    kind = kind or (F32 if weights == F32 else BF16)
    make: Any = partial(Int8KernelCache, real=torch.float32) if kind == INT8 else KernelCache
    cache = make(subject.config, blocks, BLOCK, dtype=getattr(torch, kind))
    if kind != INT8:
        cache.kv.normal_(generator=torch.Generator().manual_seed(0))
    return KernelRunner(model_of(subject, weights), cache, release=True)


def inputs_of(count: int, context: int) -> tuple[list[int], list[Any], list[int]]:
    """A decode step of `count` sequences in blocks anywhere; without a context, a prompt."""
    if not context:
        return [7] * count, [(list(range(-(-count // BLOCK))), 0, count)], [count - 1]
    size = -(-(context + 1) // BLOCK)
    order = torch.randperm(count * size, generator=torch.Generator().manual_seed(0)).tolist()
    shares = [(order[row * size : (row + 1) * size], context, 1) for row in range(count)]
    return [7] * count, shares, list(range(count))


def proof_of(subject: Subject, weights: str, runner: KernelRunner) -> dict[str, Any]:
    """The kernels' next token of a prompt is that of the slow layers of the same model. Another
    last bit before a code is rounded makes another code, so near ties are those of 8 bits."""
    judge = Runner(model_of(subject, weights).float(), PagedCache(subject.config, 2, BLOCK))
    dtype, inputs = torch.float32 if weights == F32 else torch.bfloat16, inputs_of(32, 0)
    return kit.prove(judge.run(*inputs), runner.run(*inputs).argmax(-1), dtype)


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", F32), ("stories", F32)):
        whole = subject.about["model"] == "gpt2" or bench.quick
        blocks = 64 * -(-(CONTEXT + 1) // BLOCK)
        runners = {weights: runner_of(subject, weights, blocks) for weights in FORMATS}
        proofs = [proof_of(subject, weights, run) for weights, run in runners.items()]
        read = {weights: run.program.bytes for weights, run in runners.items()}
        about: dict[str, Any] = subject.about | {"bytes": read}
        for count in bench.sizes(1, 8, 32, 64, PROMPT) if whole else (1,):
            about |= {"rows": count, "context": 0 if count == PROMPT else CONTEXT}
            inputs = inputs_of(count, about["context"])
            ways = {weights: partial(run.run, *inputs) for weights, run in runners.items()}
            bench.row("steps", ways, 7, 1, partial(kit.together, proofs), **about)
        del runners
        for context in bench.sizes(64, 1000) if whole else ():
            blocks, inputs = 32 * -(-(context + 1) // BLOCK), inputs_of(32, context)
            runners = {kind: runner_of(subject, INT8, blocks, kind) for kind in (BF16, INT8)}
            ways = {kind: partial(run.run, *inputs) for kind, run in runners.items()}
            bench.row("caches", ways, 7, **subject.about, rows=32, context=context)
    if not bench.quick:
        bench.results["quality"] = [*quality.losses(8, 16)]


def bound(row: Row, weights: str, keys: str = "") -> float:
    """The least seconds of a pass. Bytes are multiplied twice as fast as bfloat16's numbers;
    without rounded activations they are widened to float32."""
    config, dtype = row.config, getattr(torch, keys or (F32 if weights == F32 else BF16))
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
        | {f"{weights}, ms": row.ms(weights) for weights in FORMATS}
        | {"same tokens": row.proof}
        for row in results.rows("steps")
    ]
    lost = [quality.line(row) for row in results.rows("quality")]
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
        yield kit.claim(what, 0.3, 0.3, 1e3 * row["kl"], "")


def chart(results: Results) -> Figure:
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
