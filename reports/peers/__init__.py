"""Other engines beside ours, on one checkpoint: `python -m reports.peers`, once
`python -m reports.peers.install` has installed them.

Every engine is a process that stays. In each round they take turns on the same prompts, with as
many threads; the processes of the others are stopped meanwhile. Our answers are proved; how many of
an engine's answers are ours is counted. An engine without a figure says why. With `--model
gpt2-large`, or another of GPT-2's shapes, it is measured once, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from shared import charts, kit
from shared.errors import UserError
from shared.kit import Results, Row, Subject
from shared.peers import transformers_model

from .install import ENGINES, HOME, OURS
from .process import Driver

FORMATS = ("float32", "bfloat16", "int8", "int4")
PREFILL, DECODE = "prefill", "decode"
# Rows, and tokens of each prompt and answer.
CELLS = ((PREFILL, 1, 512, 1), (DECODE, 1, 64, 64), (DECODE, 32, 64, 32))


def write(subject: Subject, folder: Path) -> Path:
    """A checkpoint folder that all engines read, unless it is there. Its tokenizer knows no text:
    each token has a name."""
    if not (folder / "tokenizer.json").exists():
        transformers_model(subject.shape, torch.float32).save_pretrained(folder)
        names = {f"t{id}": id for id in range(subject.config.vocab_size)}
        Tokenizer(WordLevel(names, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def measure(bench: kit.Bench, model: str = "") -> None:
    formats = FORMATS if model else bench.sizes(*FORMATS)
    model = model or ("stories" if bench.quick else "gpt2")
    subject, threads = Subject(model, "float32"), torch.get_num_threads()
    folder = write(subject, HOME / "models" / model)
    bench.results["failed"] = failed = list[dict[str, Any]]()
    for weights in formats:
        dtype = "float32" if weights == "float32" else "bfloat16"
        with ExitStack() as stack:
            running: dict[str, Driver] = {}
            for name, engine in ENGINES.items():
                if weights not in engine.formats:
                    continue
                try:
                    if not engine.is_installed:
                        raise UserError("it is not installed: python -m reports.peers.install")
                    command = engine.command(folder, dtype, weights, threads)
                    driver = stack.enter_context(Driver(command, engine.environment(threads)))
                    driver.ready()
                    for _, rows, prompt, _ in CELLS:  # warms up
                        driver.ask(subject.prompts([prompt] * rows), 2)
                    running[name] = driver
                except UserError as error:
                    failed.append({"engine": name, "weights": weights, "reason": str(error)})
            for what, *sizes in CELLS:
                cell(bench, Subject(model, dtype), weights, what, sizes, running)


def cell(
    bench: kit.Bench, judge: Subject, weights: str, what: str, sizes: list[int], running: Any
) -> None:
    """One workload by all engines in turn. judge: proves our tokens of plain weights."""
    rows, length, count = sizes
    prompts, tokens = judge.prompts([length] * rows), dict[str, list[list[int]]]()

    def run(name: str) -> dict[str, Any]:
        reply = running[name].ask(prompts, count)
        tokens[name], seconds, work = reply["tokens"], reply["seconds"], length
        if what == DECODE:  # less the time to the first tokens
            seconds -= running[name].ask(prompts, 1)["seconds"]
            work = rows * (count - 1)
        return {"seconds": seconds, "rate": work / seconds}

    about = judge.about | {"weights": weights, "what": what, "rows": rows}
    about |= {"length": length, "count": count}
    proof = (lambda: judge.prove(prompts, tokens[OURS])) if weights == about["dtype"] else None
    ways = {name: partial(run, name) for name in running}
    bench.row("cells", ways, prove=proof, **about)
    same = {name: sum(map(list.__eq__, ids, tokens[OURS])) for name, ids in tokens.items()}
    bench.results["cells"][-1]["same"] = same


# ---- table and chart ----------------------------------------------------------------------------


def heading(row: Row) -> str:
    rows = "1 row" if row["rows"] == 1 else f"{row['rows']} rows"
    return f"prefill {row['length']}" if row["what"] == PREFILL else rows


def lines(results: Results) -> Iterator[Mapping[str, object]]:
    """A line for each engine and format of the weights: tokens per second."""
    headings = dict.fromkeys(map(heading, results.rows("cells")), "")
    failed = results.content["results"]["failed"]
    reasons = {(line["weights"], line["engine"]): line["reason"] for line in failed}
    for weights in FORMATS:
        rows = results.rows("cells", weights=weights)
        for name in ENGINES:
            line = {"weights": weights, "engine": name} | headings
            known = [row for row in rows if name in row["rate"]]
            line |= {heading(row): kit.spread(row["rate"][name], 0) for row in known}
            same = sum(row["same"][name] for row in known)
            counted = f"{same} of {sum(row['rows'] for row in known)}" if known else ""
            if last := counted or reasons.get((weights, name)):
                yield line | {"answers as ours": last}
        if rows:
            bounds = {heading(row): f"{bound(row):,.0f}" for row in rows}
            yield {"weights": weights, "engine": "the bound of plain weights"} | bounds


def bound(row: Row) -> float:
    """Tokens per second that bytes and operations allow, with weights of the row's dtype."""
    if row["what"] == PREFILL:
        return float(row["length"] / row.bound(row["length"]))
    return float(row["rows"] / row.bound(1, row["length"] + row["count"] // 2, row["rows"]))


def tables(results: Results) -> kit.Tables:
    return {"engines": lines(results)}


def chart(results: Results) -> charts.Figure:
    """One question: who decodes one row fastest, by the format of the weights?"""
    rows = [r for r in results.rows("cells", what=DECODE, rows=1) if r["weights"] in FORMATS[:3]]
    names = [name for name in ENGINES if any(name in row["rate"] for row in rows)]
    series = {
        row["weights"]: [row.median(n, "rate") if n in row["rate"] else float("nan") for n in names]
        for row in rows
    }
    title = "One request: tokens per second, by engine"
    return charts.bars(title, "tok/s (GPT-2 124M shape)", names, series, digits=0)
