"""What is known of the kernels without a GPU, and what a GPU measures where there is one:
`python -m stage13_gpu.benchmark`.

Registers come from the assembler, bytes and operations from the interpreter, predictions from data
sheets. With CUDA, decode steps are proved and timed: stage 05, the kernels, and the kernels in a
graph.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shared import cli, measure, models
from shared.bench import kit
from shared.bench.kit import Group, Subject
from shared.bench.rows import Draw, Results, median, table
from stage04_continuous.runner import Runner
from stage05_paged.engine import cache_type
from stage10_quantization.convert import Quantize

from .predict import GPUS, WEIGHTS, launches, seconds
from .registers import MODELS, compiled

STAGE = "stage13_gpu"
PAGED, EAGER, GRAPH = "paged", "eager", "graph"
NOT_MEASURED = "not measured"
FULL = kit.plan(
    models=MODELS,
    dtypes=("bfloat16",),
    repeats=20,
    counted=300,
    rows=(1, 32),
    contexts=(1000,),
    device="cpu",
)
FEW = {"counted": 100, "contexts": (300,)}


# ---- without a GPU ------------------------------------------------------------------------------


def counts(plan: Any) -> Iterator[Group]:
    """Bytes and operations of attention in one layer of the first model, in float32: a decode step
    of one row, and a prompt, each of `counted` tokens; and of its first product, quantized. Beside
    them the least: every number once."""
    from .cache import GpuCache
    from .counting import counting
    from .layers import GpuMatrix, KernelLinear

    config = replace(models.presets()[plan.models[0]], n_layer=1)
    heads, width, size = config.n_head, config.head_dim, 4
    cache = GpuCache(config, -(-plan.counted // 16))
    table_ = list(range(cache.blocks))
    for new in (1, plan.counted):
        share = (table_, plan.counted - new, new)
        q, k, v = torch.randn(3, new, heads, width)
        with counting() as counted:
            cache.extend([share]).attend(0, q, k, v)
        row, keys = heads * width * size, plan.counted
        pairs = new * (2 * keys - new + 1) // 2  # of a query and a key that it sees
        least = {
            "store": 2 * row * new,
            "decode": row * (1 + 2 * keys), "merge": row, "prefill": row * (new + 2 * keys),
        }  # fmt: skip
        for kernel, count in counted.items():
            yield {
                "kernel": kernel, "tokens": new, "context": keys, "programs": count.programs,
                "loaded": count.loaded, "stored": count.stored, "least": least[kernel],
                "operations": count.operations,
                "needed": 4 * heads * width * pairs if kernel in ("decode", "prefill") else 0,
            }  # fmt: skip
    plain = torch.nn.Linear(config.n_embd, 3 * config.n_embd)
    for weights in WEIGHTS:
        slow = Quantize(weights).layer("c_attn", plain, {})
        layer = KernelLinear(GpuMatrix.of(slow.matrix, torch.device("cpu")), slow.bias)
        with counting() as counted:
            layer(torch.randn(1, config.n_embd))
        count, read = counted["multiply"], layer.bytes + plain.bias.nbytes + config.n_embd + size
        yield {
            "kernel": f"multiply, {weights}", "tokens": 1, "context": 0,
            "programs": count.programs, "loaded": count.loaded, "stored": count.stored,
            "least": read, "operations": count.operations, "needed": 2 * plain.weight.numel(),
        }  # fmt: skip


# ---- with one -----------------------------------------------------------------------------------


def steps(subject: Subject, plan: Any) -> Iterator[Group]:
    """A decode step by stage 05, by the kernels one by one, and as a graph; each is proved by the
    logits of stage 05 in float32."""
    from .cache import GpuCache
    from .runner import GpuRunner

    config, dtype = subject.config, subject.dtype
    size = -(-(max(plan.contexts) + 1) // 16)
    blocks = max(plan.rows) * size
    paged = cache_type(config, dtype)(config, blocks, 16, 0, dtype, "cuda")
    paged.memory.planes[0].normal_(generator=torch.Generator("cuda").manual_seed(0))
    ours = GpuCache(config, blocks, 16, dtype=dtype)
    ours.kv.copy_(paged.memory.planes[0].movedim(0, 3))
    exact = cache_type(config, torch.float32)(config, blocks, 16, 0, torch.float32, "cuda")
    exact.memory.planes[0].copy_(paged.memory.planes[0])
    judge = Runner(models.load_model(subject.shape, "cuda", dtype).float(), exact)
    model = models.load_model(subject.shape, "cuda", dtype)
    runners: dict[str, Any] = {PAGED: Runner(model, paged), EAGER: GpuRunner(model, ours)}
    runners[EAGER].graphs = None
    runners[GRAPH] = GpuRunner(model, ours)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    for count in plan.rows:
        for context in plan.contexts:
            shares = [(order[i * size : (i + 1) * size], context, 1) for i in range(count)]
            inputs = [7] * count, shares, list(range(count))
            ways = {name: partial(runner.run, *inputs) for name, runner in runners.items()}
            logits = judge.run(*inputs)
            proof = {n: kit.prove(logits, way().argmax(-1), dtype) for n, way in ways.items()}
            taken = measure.alternate(ways, plan.repeats)
            yield {"count": count, "context": context, "seconds": taken, "proof": proof}


def work(plan: Any) -> dict[str, Any]:
    results: dict[str, Any] = {"steps": []}
    if plan.device == "cuda":
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        for dtype in plan.dtypes if bfloat16 else ("float16",):
            for name in plan.models:
                subject = Subject(kit.shape(name), getattr(torch, dtype), "cuda")
                results["steps"] += [subject.about | group for group in steps(subject, plan)]
    else:  # the interpreter counts; a GPU's results keep what it measured
        os.environ["TRITON_INTERPRET"] = "1"  # kernels are not imported yet, nor a GPU asked for
        results["registers"] = compiled(plan.models)
        results["counts"] = list(counts(plan))
    return results


# ---- tables -------------------------------------------------------------------------------------


def registers_table(results: Results) -> str:
    """A line for each kernel, dtype and model: the most that any of its variants needs."""
    lines: dict[tuple[str, ...], list[Group]] = {}
    for group in results.content["results"].get("registers", ()):
        key = group["kernel"], group["dtype"], group["model"]
        lines.setdefault(key, []).append(group)
    return table(
        {
            "kernel": kernel, "dtype": dtype, "model": model,
            **{
                f"registers, {gpu}": max(g["registers"] for g in groups if g["gpu"] == gpu)
                for gpu in ("H100", "A100", "L4")
            },
            "bytes spilled": max(g["spilled"] for g in groups),
            "shared memory, bytes": f"{max(g['shared'] for g in groups):,}",
        }
        for (kernel, dtype, model), groups in sorted(lines.items())
    )  # fmt: skip


def counts_table(results: Results) -> str:
    return table(
        {
            "kernel": group["kernel"], "new tokens": f"{group['tokens']:,}",
            "programs": f"{group['programs']:,}", "loaded, KB": f"{group['loaded'] / 1e3:,.0f}",
            "the least, KB": f"{group['least'] / 1e3:,.0f}",
            "loaded over least": f"{group['loaded'] / group['least']:.2f}x",
            "operations over needed": (
                f"{group['operations'] / group['needed']:.1f}x" if group["needed"] else ""
            ),
        }
        for group in results.content["results"].get("counts", ())
    )  # fmt: skip


def measured_steps() -> Iterator[tuple[str, Group]]:
    """The steps that GPUs have measured, each with the GPU's name, from the results of all
    machines."""
    for path in sorted(measure.REPORTS.glob(f"*/{STAGE}.json")):
        content = measure.load(path)
        for group in content["results"]["steps"]:
            yield content["machine"]["device"], group


def measured(model: str, gpu: str, rows: int, variant: str) -> str:
    """Microseconds of a step in bfloat16 (float16 on a T4) with 1,000 tokens of context."""
    wanted = (model, "float16" if gpu == "T4" else "bfloat16", rows, 1000)
    for device, group in measured_steps():
        step = tuple(group[key] for key in ("model", "dtype", "count", "context"))
        if re.search(rf"\b{gpu.split()[0]}\b", device) and step == wanted:  # L40 is no L4
            return f"{1e6 * median(group['seconds'][variant]):,.0f}"
    return NOT_MEASURED


def predicted(model: str) -> Iterator[dict[str, str]]:
    """A line for each GPU and number of rows at 1,000 tokens, in bfloat16, in microseconds."""
    config = models.presets()[model]
    for name, gpu in GPUS.items():
        for rows in (1, 32):
            parts = seconds(config, torch.bfloat16, rows, 1000, gpu)
            yield {
                "GPU": name, "rows": str(rows),
                **{part: f"{1e6 * value:,.0f}" for part, value in parts.items()},
                "measured, graph": measured(model, name, rows, GRAPH),
            }  # fmt: skip


def claims(results: Results) -> Iterator[dict[str, str]]:
    """The lesson's table: a step of GPT-2 124M on an H100."""
    config, gpu = models.presets()["gpt2"], GPUS["H100 SXM"]
    for rows, *by_hand in ((1, 635, 137), (32, 635, 426)):
        parts = seconds(config, torch.bfloat16, rows, 1000, gpu)
        counted = f"{launches(config, 1000)} launches of 5 us"
        whys = counted, "a graph leaves 1 us between kernels"
        for variant, hand, why in zip(("eager", "graph"), by_hand, whys, strict=True):
            least = max(parts["bytes"], parts["operations"])
            yield {
                "prediction": f"{kit.counted(rows, 'row')}, {variant}, us", "by hand": str(hand),
                "from data sheets": f"{1e6 * parts[variant]:,.0f}",
                "bound": f"{1e6 * least:,.0f}",
                "measured": measured("gpt2", "H100", rows, variant),
                "why": why,
            }  # fmt: skip


def step_table(model: str, results: Results) -> str:
    return table(predicted(model))


def quantized_table(results: Results) -> str:
    config = models.presets()[MODELS[1]]
    return table(
        {
            "GPU": gpu, "weights": weights, "rows": str(rows),
            **{
                part: f"{1e6 * value:,.0f}"
                for part, value in seconds(
                    config, torch.bfloat16, rows, 1000, GPUS[gpu], weights
                ).items()
            },
        }
        for gpu in ("H100 SXM", "L4") for weights in WEIGHTS for rows in (1, 32)
    )  # fmt: skip


TABLES: dict[str, Draw] = {
    "registers": registers_table,
    "counts": counts_table,
    "claims": lambda results: table(claims(results)),
    "gpt2": partial(step_table, MODELS[0]),
    "llama": partial(step_table, MODELS[1]),
    "qwen": partial(step_table, MODELS[2]),
    "quantized": quantized_table,
}


def headline(results: Results) -> str:
    kernels = results.content["results"].get("registers", ())
    spilled = sum(bool(group["spilled"]) for group in kernels)
    gpus = sorted({device for device, _ in measured_steps()})
    if gpus:
        return f"measured on {', '.join(gpus)}"
    return (
        f"{len(kernels)} kernels compiled for A100, L4 and H100, {spilled} of which spill; "
        "no GPU has measured them yet"
    )


BENCHMARK = kit.Benchmark(
    STAGE, __doc__, FULL, work, TABLES, {}, headline, FEW,
    options={
        "device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "what to measure"},
    },
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
