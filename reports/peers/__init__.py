"""Other engines beside ours, on one checkpoint: `python -m reports.peers`, once
`python -m reports.peers.install` has installed them.

Every engine is a process that stays. In each round they take turns on the same prompts, with as
many threads. Our answers are proved; how many of an engine's answers are ours is counted. An engine
without a figure says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from shared import charts, kit
from shared.errors import UserError
from shared.kit import Results, Row, Subject
from shared.roofline import forward_cost

from . import folder
from .install import ENGINES, HOME, is_installed, is_ours
from .process import Driver, started

NAME = "peers"
FORMATS = ("float32", "bfloat16", "int8", "int4")
PREFILL, DECODE = "prefill", "decode"
# Rows, and tokens of each prompt and answer.
ASKS = ((PREFILL, 1, 512, 1), (DECODE, 1, 64, 64), (DECODE, 32, 64, 32))


def measure(bench: kit.Bench) -> None:
    model = "stories" if bench.quick else "gpt2"
    subject = Subject(model, "float32")
    place = folder.write(subject.shape, HOME / "models" / model)
    bench.results["failed"] = failed = list[dict[str, Any]]()
    for weights in bench.sizes(*FORMATS):
        dtype = "float32" if weights == "float32" else "bfloat16"
        with ExitStack() as stack:
            running: dict[str, Driver] = {}
            for name, engine in ENGINES.items():
                if weights not in engine.formats:
                    continue
                try:
                    if not is_installed(engine):
                        raise UserError("it is not installed: python -m reports.peers.install")
                    driver = stack.enter_context(started(engine, place, dtype, weights))
                    driver.ready()
                    for _, rows, prompt, _ in ASKS:  # warms up
                        driver.ask(subject.prompts([prompt] * rows), 2)
                    running[name] = driver
                except UserError as error:
                    failed.append({"engine": name, "weights": weights, "reason": str(error)})
            for what, *ask in ASKS:
                cell(bench, subject, weights, what, ask, running)


def cell(
    bench: kit.Bench, subject: Subject, weights: str, what: str, ask: list[int], running: Any
) -> None:
    """One workload by all engines in turn."""
    rows, length, count = ask
    prompts, tokens = subject.prompts([length] * rows), dict[str, list[list[int]]]()

    def run(name: str) -> dict[str, Any]:
        reply = running[name].ask(prompts, count)
        tokens[name] = reply["tokens"]
        seconds = reply["first"] if what == PREFILL else reply["seconds"] - reply["first"]
        work = length if what == PREFILL else rows * count - reply["begun"]
        return {"seconds": seconds, "rate": work / seconds}

    def proof() -> dict[str, Any]:
        ours = [ids for name, ids in tokens.items() if is_ours(name)]
        if weights in ("float32", "bfloat16"):
            judge = Subject(subject.about["model"], weights)
            return kit.together(judge.prove(prompts, ids) for ids in ours)
        return {"tokens": 0, "near_ties": 0}  # stage 10 proves its formats

    about: dict[str, Any] = {
        "model": subject.about["model"],
        "dtype": "float32" if weights == "float32" else "bfloat16",
    }
    about |= {"weights": weights, "what": what, "rows": rows, "length": length, "count": count}
    ways = {name: partial(run, name) for name in running}
    bench.row("cells", ways, 7 if rows == 1 else 3, 1, proof, **about)
    like = next((ids for name, ids in tokens.items() if is_ours(name)), [])
    bench.results["cells"][-1]["same"] = {
        name: sum(map(list.__eq__, ids, like)) for name, ids in tokens.items()
    }


# ---- table and chart ----------------------------------------------------------------------------


def heading(row: Row) -> str:
    if row["what"] == PREFILL:
        return f"prefill {row['length']}"
    return "1 row" if row["rows"] == 1 else f"{row['rows']} rows"


def lines(results: Results) -> Iterator[Mapping[str, object]]:
    """A line for each engine and format of the weights: tokens per second."""
    headings = dict.fromkeys(map(heading, results.rows("cells")))
    reasons = {
        (f["weights"], f["engine"]): f["reason"] for f in results.content["results"]["failed"]
    }
    for weights in FORMATS:
        rows = results.rows("cells", weights=weights)
        for name in ENGINES:
            cells = {
                heading(row): kit.spread(row["rate"][name], 0)
                for row in rows
                if name in row["rate"]
            }
            if cells:
                same = sum(row["same"][name] for row in rows if name in row["same"])
                more: dict[str, object] = {
                    "answers as ours": f"{same} of {sum(r['rows'] for r in rows)}"
                }
            elif (weights, name) in reasons:
                more = {"answers as ours": reasons[weights, name]}
            else:
                continue
            yield {"weights": weights, "engine": name} | dict.fromkeys(headings, "") | cells | more
        if rows:
            bounds = {heading(row): f"{bound(row):,.0f}" for row in rows}
            yield {"weights": weights, "engine": "the bound of plain weights"} | bounds


def bound(row: Row) -> float:
    """Tokens per second that bytes and operations allow, with weights of the row's dtype."""
    if row["what"] == PREFILL:
        return float(row["length"] / row.least(forward_cost(row.config, row.kind, row["length"])))
    cost = forward_cost(
        row.config, row.kind, 1, row["length"] + row["count"] // 2, rows=row["rows"]
    )
    return float(row["rows"] / row.least(cost))


def tables(results: Results) -> kit.Tables:
    return {"engines": lines(results)}


def chart(results: Results) -> Figure:
    """One question: who decodes one row fastest, by the format of the weights?"""
    rows = [r for r in results.rows("cells", what=DECODE, rows=1) if r["weights"] in FORMATS[:3]]
    names = [name for name in ENGINES if any(name in row["rate"] for row in rows)]
    series = {
        row["weights"]: [row.median(n, "rate") if n in row["rate"] else float("nan") for n in names]
        for row in rows
    }
    title = "One request: tokens per second by engine and format of the weights"
    return charts.bars(title, "tok/s (GPT-2 124M shape)", names, series, digits=0)


def headline(results: Results) -> str:
    for row in results.rows("cells", weights="float32", what=DECODE, rows=32):
        ours, *others = sorted(
            row["rate"], key=lambda name: (not is_ours(name), -row.median(name, "rate"))
        )
        ratio = row.median(ours, "rate") / max((row.median(n, "rate") for n in others), default=1.0)
        return f"{ratio:.2f}x the fastest other engine with 32 rows"
    return kit.UNMEASURED
