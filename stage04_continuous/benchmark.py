"""What a decision before every step buys: `python -m stage04_continuous.benchmark`.

Win: a crowd of unlike answers. Null: as many equal requests as slots. Lose: a long prompt that
arrives in the middle of its neighbours' answers. Every answer is proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np

from shared import charts, cli, kit
from shared.kit import Results, Row, Subject
from shared.roofline import Cost, static_costs
from stage03_batching.engine import Engine as StaticEngine

from . import timeline
from .engine import make
from .request import Request
from .scheduler import Scheduler

STATIC, OURS = "stage 03, static", "stage 04, continuous"
SLOTS, BUDGET = 24, 256  # of the crowd; tokens a pass
NEIGHBOURS, NEIGHBOUR, AFTER = 8, 64, 64  # requests; tokens of their prompts and answers
LONG, LONG_ANSWER, WHOLE = 900, 8, "whole"  # tokens; WHOLE: in one chunk
DRAWN = (16, 200)  # slots and steps of the crowd on the chart


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32"), ("gpt2", "bfloat16")):
        if subject.about["dtype"] == "float32":
            together(bench, subject, "crowd", kit.crowd(12 if bench.quick else 72))
            together(bench, subject, "equal", [(8, 32)] * SLOTS)
        sizes = bench.sizes(("64", 64), ("256", 256), (WHOLE, LONG))
        ways = {chunk: partial(arrive, subject, size) for chunk, size in sizes}
        bench.row("chunking", ways, 2, 0, **subject.about)


def together(bench: kit.Bench, subject: Subject, case: str, lengths: Any) -> None:
    """One workload on stage 03 and on this stage, with the same slots."""
    passes = kit.Passes(subject)
    ours = make(subject.model, SLOTS, token_budget=BUDGET, observers=[passes])

    def keep(engine: Any) -> dict[str, Any]:
        busy = {"busy": sum(step.rows for step in engine.steps)}
        bars = timeline.bars([*ours.steps][: DRAWN[1]])
        drawn = [astuple(bar) for bar in bars if bar.slot < DRAWN[0]]
        costs = passes.costs[-len(ours.steps) :]
        return busy | {"costs": costs, "bars": drawn} if engine is ours else busy

    engines = {STATIC: StaticEngine(subject.model, max_batch=SLOTS), OURS: ours}
    bench.answers(case, subject, engines, lengths, 2, keep)


def arrive(subject: Subject, chunk: int) -> dict[str, Any]:
    """A long prompt arrives while its neighbours decode: milliseconds between their tokens after
    that, and seconds to its own first token. Every neighbour has a token in each pass."""
    scheduler = Scheduler(NEIGHBOURS + 1, NEIGHBOURS + LONG, max_chunk=chunk)
    passes = kit.Passes(subject)
    engine = make(subject.model, scheduler=scheduler, observers=[passes])
    *prompts, long = subject.prompts([NEIGHBOUR] * NEIGHBOURS + [LONG])
    requests = [engine.add(Request(prompt, kit.greedy(1 + AFTER))) for prompt in prompts]
    while not all(request.output.token_ids for request in requests):
        engine.step()
    requests.append(engine.add(Request(long, kit.greedy(LONG_ANSWER))))
    gaps = [1e3 * kit.measure.timed(engine.step)[0] for _ in range(AFTER)]
    assert not engine.requests, "a neighbour went without a token in some pass"
    subject.prove([*prompts, long], [request.output.token_ids for request in requests])
    count = -(-LONG // chunk)  # passes over the long prompt
    costs = passes.costs[-AFTER:][:count]
    return {"seconds": sum(gaps[:count]) / 1e3, "gaps": gaps, "costs": costs}


def passes(row: Row, variant: str) -> list[float]:
    """The least seconds of each pass."""
    if variant == STATIC:
        return [*map(row.least, static_costs(row.config, row.kind, row.lengths, SLOTS))]
    return [row.least(Cost(*pair)) for pair in row["costs"][variant][-1]]


def tables(results: Results) -> kit.Tables:
    win = [
        {
            "requests": f"{len(row.lengths)}, {case}", "engine": variant,
            "tok/s": row.rate(variant), "slots in use": f"{busy / steps / SLOTS:.0%}",
            "steps": f"{steps:,.0f}",
            "over stage 03": f"{row.gain(STATIC, variant):.2f}x",
        }
        for case in ("crowd", "equal") for row in results.rows(case) for variant in (STATIC, OURS)
        for busy, steps in [(row.median(variant, "busy"), row.median(variant, "passes"))]
    ]  # fmt: skip
    chunking = [
        {
            "dtype": row["dtype"], "chunks of the long prompt": chunk,
            "median gap, ms": f"{np.median(runs):.1f}", "longest, ms": f"{np.max(runs):.1f}",
            "limit, ms": f"{1e3 * max(passes(row, chunk)):.1f}",
            "its first token, s": kit.spread(row["seconds"][chunk], 2),
        }
        for row in results.rows("chunking") for chunk, runs in row["gaps"].items()
    ]  # fmt: skip
    return {"win": win, "chunking": chunking, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts, for GPT-2 in float32."""
    for row in results.rows("crowd", model="gpt2") + results.rows("equal", model="gpt2"):
        static, ours = passes(row, STATIC), passes(row, OURS)
        here, gain = sum(static) / sum(ours), row.gain(STATIC, OURS)
        if len({answer for _, answer in row.lengths}) == 1:
            why = "the control: nothing to refill"
            yield kit.claim("the same for equal answers, all at once", 1.0, here, gain, why=why)
            continue
        steps, counted = len(static) / len(ours), row.gain(STATIC, OURS, "passes")
        why = "by hand no slot is ever empty; the last long answers begin late and leave a tail"
        yield kit.claim("steps of the crowd, static over ours", 3.0, steps, counted, why=why)
        why = "fewer steps, of fewer rows"
        yield kit.claim("seconds of the crowd, static over ours", 2.26, here, gain, why=why)
    for row in results.rows("chunking", model="gpt2", dtype="float32"):
        peak, far = "by hand, half the arithmetic", "products of 70 rows are far from the peak"
        for chunk, hand, why in ((WHOLE, 850, peak), ("64", 74.6, far)):
            here, most = 1e3 * max(passes(row, chunk)), float(np.max(row["gaps"][chunk]))
            what = f"longest gap of a neighbour, chunks: {chunk}"
            yield kit.claim(what, hand, here, most, "ms", why)
        here, what = 1e3 * sum(passes(row, "64")), "first token of the long prompt, chunks of 64"
        yield kit.claim(what, 991, here, 1e3 * row.median("64"), "ms", far)


def chart(results: Results) -> charts.Figure:
    (row, *_) = results.rows("crowd")
    bars = [timeline.Bar(*bar) for bar in row["bars"][OURS][-1]]
    title = f"Slots are handed on: {DRAWN[0]} of {SLOTS} slots, the first {DRAWN[1]} steps"
    return timeline.draw(bars, DRAWN[1], title, DRAWN[0])


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("crowd"):
        yield f"{row.gain(STATIC, OURS):.1f}x static batching where answers differ"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage04_continuous", __doc__, measure, tables))
