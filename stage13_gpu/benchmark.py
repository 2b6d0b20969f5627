"""What is known of the kernels without a GPU, and what a GPU measures where there is one:
`python -m stage13_gpu.benchmark`.

Registers come from the assembler, and predictions from data sheets (`predict.py`). With CUDA,
decode steps are proved and timed: stage 05, the kernels one by one, and in a graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from shared import catalog, cli, kit, models
from shared.kit import Results, Subject
from stage04_continuous.runner import Runner
from stage05_paged.cache import PagedCache

from .predict import GPUS, launches, seconds
from .registers import compiled

PAGED, EAGER, GRAPH = "paged", "eager", "graph"
MODELS = ("gpt2", "meta-llama/Llama-3.2-1B")
CONTEXT = 1000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def measure(bench: kit.Bench) -> None:
    if DEVICE == "cpu":
        known = find_spec("triton") and not bench.quick
        bench.results["registers"] = list(compiled(MODELS[:1])) if known else []
        return
    for name in bench.sizes(*MODELS):
        subject = Subject(name, "bfloat16", DEVICE, plain=True)
        for rows in bench.sizes(1, 32):
            steps(bench, subject, rows)


def steps(bench: kit.Bench, subject: Subject, rows: int) -> None:
    """A decode step, proved by the logits of stage 05 in float32."""
    from .cache import GpuCache
    from .runner import GpuRunner

    config, dtype, size = subject.config, subject.dtype, -(-(CONTEXT + 1) // 16)
    blocks = rows * size
    paged = PagedCache(config, blocks, 16, 0, dtype, DEVICE)
    paged.kv.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    ours = GpuCache(config, blocks, 16, dtype=dtype)
    exact = PagedCache(config, blocks, 16, 0, torch.float32, DEVICE)
    for cache in (ours, exact):
        cache.kv.copy_(paged.kv)
    judge = Runner(models.load_model(subject.shape, DEVICE, dtype).float(), exact)
    runners: dict[str, Any] = {PAGED: Runner(subject.model, paged)}
    runners |= {name: GpuRunner(subject.model, ours) for name in (EAGER, GRAPH)}
    runners[EAGER].graphs = None
    inputs = kit.inputs(rows, CONTEXT)
    ways = {name: partial(runner.run, *inputs) for name, runner in runners.items()}
    logits = judge.run(*inputs)
    proofs = [kit.prove(logits, way().argmax(-1), dtype) for way in ways.values()]
    about = {**subject.about, "rows": rows, "context": CONTEXT}
    bench.row("steps", ways, 20, 3, partial(kit.together, proofs), **about)


def measured(results: Results, gpu: str, variant: str, **step: Any) -> str:
    """Microseconds of a step in bfloat16 on a GPU, where the results are of one."""
    if re.search(rf"\b{gpu.split()[0]}\b", results.content["machine"]["device"]):  # L40 is no L4
        for row in results.rows("steps", **step):
            return f"{1e6 * row.median(variant):,.0f}"
    return "not measured"


def predicted(results: Results, model: str) -> Iterator[dict[str, str]]:
    """A line for each GPU and number of rows at 1,000 tokens, in bfloat16, in microseconds."""
    for name, gpu in GPUS.items():
        for rows in (1, 32):
            parts = seconds(catalog.presets()[model], torch.bfloat16, rows, CONTEXT, gpu)
            yield {
                "model": model.rpartition("/")[2], "GPU": name, "rows": str(rows),
                **{part: f"{1e6 * value:,.0f}" for part, value in parts.items()},
                "measured, graph": measured(results, name, GRAPH, model=model, rows=rows),
            }  # fmt: skip


def tables(results: Results) -> kit.Tables:
    groups = results.content["results"].get("registers", ())
    most = []
    for name, dtype in dict.fromkeys((group["kernel"], group["dtype"]) for group in groups):
        same = [group for group in groups if (group["kernel"], group["dtype"]) == (name, dtype)]
        registers, spilled = (max(g[field] for g in same) for field in ("registers", "spilled"))
        line = {"kernel": name, "dtype": dtype, "registers": registers, "bytes spilled": spilled}
        most.append(line)
    steps = [line for model in MODELS for line in predicted(results, model)]
    return {"steps": steps, "registers": most, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """The lesson's table: a step of GPT-2 124M on an H100."""
    config, gpu = catalog.presets()["gpt2"], GPUS["H100 SXM"]
    whys = {EAGER: f"{launches(config, CONTEXT)} launches of 5 us"}
    whys[GRAPH] = "a graph leaves 1 us between kernels"
    by_hand = (1, EAGER, 635), (1, GRAPH, 137), (32, EAGER, 635), (32, GRAPH, 426)
    for rows, variant, hand in by_hand:
        parts = seconds(config, torch.bfloat16, rows, CONTEXT, gpu)
        yield {
            "prediction": f"{rows} rows, {variant}, us", "by hand": str(hand),
            "from data sheets": f"{1e6 * parts[variant]:,.0f}",
            "bound": f"{1e6 * max(parts['bytes'], parts['operations']):,.0f}",
            "measured": measured(results, "H100", variant, model="gpt2", rows=rows),
            "why": whys[variant],
        }  # fmt: skip


def headline(results: Results) -> Iterator[str]:
    measured_on = results.content["machine"]["device"] if results.rows("steps") else ""
    yield f"measured on {measured_on}" if measured_on else "not measured on a GPU yet"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage13_gpu", __doc__, measure, tables, device=DEVICE))
