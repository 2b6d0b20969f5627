"""Our engines beside others on this processor, in one measurement.

    python -m reports.peers            GPT-2 124M: a prompt of 512, decode of 1 to 64 rows
    python -m reports.peers.shapes     one row of TinyLlama's and Qwen3-0.6B's shapes
    python -m reports.peers.quantized  GPT-2 124M with weights of 8 and 4 bits

Each engine runs in a long-lived process of its own (`process`), in its own environment in the cache
folder (`install`), which takes 3 GB, and minutes to compile llama.cpp. All get the same prompts and
the same seeded checkpoint. The engines take turns in every round, together with a measurement of
what memory and arithmetic give at that time. A run is repeated if other programs took more than 4 %
of a processor meanwhile. Our answers are proved, and the others' answers that equal them are
counted. An engine that cannot be installed, ends or hangs is named with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from shared import charts, measure
from shared.bench import kit, rows
from shared.bench.rows import Results, Row
from shared.measure import Summary, summarize
from shared.parity import random_prompt
from shared.roofline import forward_cost
from stage01_forward.generation import Output
from stage09_kernels import library

from . import folder, served
from .install import ENGINES, HOME, OLDER, OURS, is_ours
from .process import Driver, Failures, started

KIND, NAME = "peers", "reports.peers"
Ask = tuple[int, int, int]  # rows, and tokens of each prompt and answer
FULL = kit.plan(
    models=("gpt2",), dtypes=kit.BOTH, engines=tuple(ENGINES),
    rounds=(9, 5, 3),  # of one row, up to 8, more: short runs meet fast and slow memory by chance
    prefills=(512,), context=64,  # tokens of a prompt alone; of each row before it decodes
    answers=((1, 64), (8, 32), (32, 32), (64, 16)),  # rows, tokens of each
    load=served.Load(),
    tries=3,  # of a run beside other programs
)  # fmt: skip
FEW = {"answers": ((1, 16), (8, 8)), "load": served.Load(4, 8, 16, 8)}


def asks_of(plan: Any) -> list[Ask]:
    """The prefill, then decoding."""
    decoding = [(rows, plan.context, new) for rows, new in plan.answers]
    return [*((1, prompt, 1) for prompt in plan.prefills), *decoding]


def has_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16."""
    return any("bf16" in name and present for name, present in library.capabilities().items())


def machine(dtype: str) -> dict[str, float]:
    """What memory and arithmetic give now, in about a second."""
    rate = measure.matmul_rate(dtype=getattr(torch, dtype), sizes=(1024,), budget=0.2)
    return {"bandwidth": measure.read_bandwidth(nbytes=2**28, budget=0.2), "gflops": rate}


def cell(
    plan: Any, model: str, dtype: str, ask: Ask, running: dict[str, Driver], failed: Failures
) -> kit.Group:
    """One workload by all engines in turn. Our answers are in "proof"."""
    count, length, new = ask
    prompts = prompts_of(model, count, length)
    ways = {
        name: (partial(driver.ask, prompts, new), driver.process.pid)
        for name, driver in running.items()
    }
    rounds = plan.rounds[0 if count == 1 else 1 if count <= 8 else 2]
    beside = {"machine": partial(machine, dtype)}
    results = failed.turns(dtype, ways, rounds, plan.tries, **beside)
    limits = results.pop("machine")
    group: kit.Group = {"model": model, "dtype": dtype, "lengths": [[length, new, count]]}
    group |= {key: [limit[key] for limit in limits] for key in limits[0]}
    group |= kit.by_variant(results) if results else {"seconds": {}}
    answers = {name: runs[-1] for name, runs in group.pop("tokens", {}).items()}
    like = answers.get(OURS, [])
    group["same"] = {name: sum(map(list.__eq__, ids, like)) for name, ids in answers.items()}
    ours = {name: ids for name, ids in answers.items() if is_ours(name)}
    return group | {"proof": {name: list(map(Output, prompts, ids)) for name, ids in ours.items()}}


def measured(plan: Any, model: str, dtype: str, results: Any) -> list[kit.Group]:
    """All cells of a model in a dtype."""
    place, failed, running = checkpoint(model), results["failed"], dict[str, Driver]()
    longest = max(*plan.prefills, plan.context, 0)
    with ExitStack() as stack:
        for name in (bar := tqdm(plan.engines, f"{dtype}: load", unit="engine")):
            bar.set_postfix_str(name)
            with failed.named(name, dtype):
                driver = stack.enter_context(started(name, place, dtype))
                for key, value in driver.ready().items():  # versions, bytes
                    results[key][name] = value
                for count, length, new in ((plan.answers[-1][0], 16, 2), (1, longest, 1)):
                    driver.ask(prompts_of(model, count, length), new)  # warms up
                running[name] = driver
        bar = tqdm(asks_of(plan), f"{dtype}: measure", unit="cell")
        return [cell(plan, model, dtype, ask, running, failed) for ask in bar]


def prove(groups: list[kit.Group], model: str, dtype: str) -> None:
    """Prove our answers, in "proof", by stage 01."""
    subject = kit.Subject(kit.shape(model), getattr(torch, dtype))
    for group in groups:
        group["proof"] = {name: subject.prove(outputs) for name, outputs in group["proof"].items()}


def prompts_of(model: str, count: int, length: int) -> list[list[int]]:
    return [random_prompt(length, kit.models.presets()[model], row) for row in range(count)]


def checkpoint(model: str) -> Path:
    return folder.write(kit.shape(model), HOME / "models" / model.replace("/", "-"))


def run(plan: Any, prove: Callable[..., None] = prove) -> dict[str, Any]:
    """Raises AssertionError for a wrong token of ours; they are proved once the engines have
    ended."""
    results: dict[str, Any] = {"cells": [], "versions": {}, "bytes": {}, "failed": Failures()}
    dtypes = plan.dtypes if has_bfloat16() else plan.dtypes[:1]
    for model, dtype in product(plan.models, dtypes):
        groups = measured(plan, model, dtype, results)
        prove(groups, model, dtype)
        results["cells"] += groups
    if plan.load:
        place, failed = checkpoint(plan.models[0]), results["failed"]
        results["served"] = [served.run(plan, place, dtypes[0], failed)]
    return results


# ---- tables and the chart ------------------------------------------------------------------------


def title(name: str) -> str:
    return name.replace(OURS, "ours, stage 09").replace(OLDER, "ours, stage 05")


def what(row: Row) -> str:
    """The name of a cell."""
    length, answer, count = row["lengths"][0]
    if answer == 1:
        return f"prefill {length}"
    return f"decode, {count} row{'s' if count > 1 else ''}"


def rate(row: Row) -> Summary:
    """Tokens per second: of the prompt, or those after each row's first one."""
    length, answer, count = row["lengths"][0]
    if answer == 1:
        return summarize(row["first"]).of(length)
    parts = zip(row["seconds"], row["first"], row["begun"], strict=True)
    return summarize([(count * answer - begun) / (all - first) for all, first, begun in parts])


def bound(row: Row) -> float:
    """Tokens per second that bytes and operations allow, by the best that the machine gave at the
    start and in this cell's rounds."""
    length, answer, count = row["lengths"][0]
    known = row.results.limits
    limits = replace(
        known,
        bandwidth_gb_s=max(known.bandwidth_gb_s, *row["bandwidth"]),
        gflops={row["dtype"]: max(known.gflops[row["dtype"]], *row["gflops"])},
    )
    if answer == 1:
        return length / forward_cost(row.config, row.kind, length).seconds(limits, row.kind)
    step = forward_cost(row.config, row.kind, 1, length + answer // 2, rows=count)
    return count / step.seconds(limits, row.kind)


def others(row: Row) -> list[Row]:
    """The engines that are not ours, the fastest first."""
    rivals = [entrant for entrant in row.variants if not is_ours(entrant.variant)]
    return sorted(rivals, key=lambda entrant: -rate(entrant).median)


def against(row: Row) -> str:
    """Our rate over that of the fastest other engine."""
    if not others(row):
        return "alone"
    best = others(row)[0]
    return f"{rate(row).median / rate(best).median:.2f}x {title(best.variant)}"


def mine(case: str, results: Results) -> list[Row]:
    return [row for row in results.rows(case) if row.variant == OURS]


def engines(dtype: str, results: Results) -> Any:
    """A line per engine, a column per cell, and what the machine allows."""
    groups = results.groups("cells", dtype=dtype)
    if not groups:
        return "This processor has no instructions for it."
    names = dict.fromkeys(name for group in groups for name in group["seconds"])
    rates = {
        title(name): [rate(g.of(name)).show(0) if name in g["seconds"] else "" for g in groups]
        for name in names
    } | {"the machine's bound": [f"{bound(g):,.0f}" for g in groups]}
    cells = list(map(what, groups))
    return [
        {"engine": name} | dict(zip(cells, texts, strict=True)) for name, texts in rates.items()
    ]


def entrants(results: Results) -> list[dict[str, str]]:
    """Every engine: its version, whether it computes the same, and why it was not measured."""
    content, lines = results.content["results"], []
    cells = results.groups("cells", dtype="float32")
    for name in results.plan["engines"]:
        rows = [row for row in cells if name in row["same"]]
        same, count = (sum(row["same"][name] for row in rows), sum(row.requests for row in rows))
        version = ["", *content["versions"].get(name, {}).values()][-1]
        reasons = [f"{f['dtype']}: {f['reason']}" for f in content["failed"] if f["engine"] == name]
        line = {"engine": title(name), "version": "" if name in (OURS, OLDER) else version}
        line |= {"answers as ours, float32": f"{same} of {count}"}
        lines.append(line | {"not measured": "; ".join(reasons)})
    return lines


COLUMNS: dict[str, rows.Column] = {
    "what": what,
    "ours, tok/s": lambda row: rate(row).show(0),
    "against the fastest other": against,
    "of the bound": lambda row: f"{rate(row).median / bound(row):.0%}",
    "memory, GB/s": lambda row: summarize(row["bandwidth"]).show(0),
    "arithmetic, GFLOP/s": lambda row: summarize(row["gflops"]).show(0),
    "other programs took": lambda row: f"{max(map(max, row.group['others'].values())):.1%}",
    "ours proved": "proof",
    "engine": lambda row: title(row.variant),
    "tok/s": lambda row: rate(row).show(1),
    "streams": "users",
    "served, tok/s": lambda row: row.rate.show(0),
    "of that without HTTP": lambda row: (
        f"{row.rate.median / row.of(served.OFFLINE).rate.median:.0%}"
        if row.variant == OURS and served.OFFLINE in row.group["seconds"]
        else ""
    ),
}
TABLES = rows.tables(
    COLUMNS,
    """
    ours < ours: dtype | what | ours, tok/s | against the fastest other | of the bound
    conditions < ours: dtype | what | memory, GB/s | arithmetic, GFLOP/s | other programs took
      | ours proved
    served < served_by: dtype | streams | engine | served, tok/s | of that without HTTP
    """,
    ours=partial(mine, "cells"),
    served_by=lambda results: results.rows("served"),
    float32=partial(engines, "float32"),
    bfloat16=partial(engines, "bfloat16"),
    entrants=entrants,
    picture=lambda results: (
        "![Tokens per second of ours and of other engines]"
        f"(reports/{measure.slug(results.content['machine'])}/peers_engines.svg)"
    ),
)


def picture(results: Results) -> Figure:
    """A panel per cell, a bar per engine."""
    panels = {}
    for row in results.groups("cells"):
        summaries = {title(entrant.variant): rate(entrant) for entrant in row.variants}
        rates = {name: (it.median, it.low, it.high) for name, it in summaries.items()}
        panels[f"{what(row)}, {row['dtype']}"] = rates
    return charts.panels(
        "Tokens per second, beside other engines", panels, (title(OURS), title(OLDER))
    )


def headline(results: Results) -> str:
    cells = [row for row in mine("cells", results) if others(row)]
    first = sum(rate(row).median > rate(others(row)[0]).median for row in cells)
    return f"the fastest engine in {first} of {len(cells)} cells"


CHARTS = {"engines": picture}
BENCHMARK = kit.Benchmark(KIND, __doc__, FULL, run, TABLES, CHARTS, headline, FEW, NAME)
