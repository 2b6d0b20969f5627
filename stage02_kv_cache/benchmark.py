"""What the KV cache buys, where it buys nothing, and what it costs:
`python -m stage02_kv_cache.benchmark`.

The naive engine takes minutes for a thousand tokens, but the time of its steps grows smoothly. So
only every 50th step of a long answer is run and timed, and those between are interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing, faster, speed
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, first, median
from shared.roofline import forward_cost, naive_costs, static_costs
from stage01_forward.engine import Engine as NaiveEngine
from stage01_forward.generation import Output

from .engine import Engine

NAIVE, CACHED = "naive", "cached"


FULL = kit.plan(
    models=("gpt2", "stories"), dtypes=kit.BOTH, repeats={NAIVE: 1, CACHED: 2},
    growth=(200, 500, 1000), stride=50,  # new tokens after a prompt of 5; between naive steps
    prompts=(64, 256, 512), answer=25,
    null_prompts=(5, 64, 512), null_repeats=3,  # for a single new token
    profiled=(1, 64, 16),
)  # fmt: skip


def engines(subject: Subject) -> dict[str, NaiveEngine | Engine]:
    return {NAIVE: NaiveEngine(subject.model), CACHED: Engine(subject.model)}


def growth(subject: Subject, plan: Any) -> Iterator[Group]:
    """Seconds of every cached step of a long answer, and of some naive steps."""
    naive, cached = NaiveEngine(subject.model), Engine(subject.model)
    (prompt,), most = subject.prompts([5], "growth"), max(plan.growth)
    places = [*range(0, most, plan.stride), most - 1]  # tokens generated before the step
    cached.generate([prompt], kit.greedy(2))  # warms up
    outputs: list[Output] = []

    def run_cached() -> list[float]:
        outputs.extend(cached.generate([prompt], kit.greedy(most)))
        return [step.seconds for step in cached.steps]

    def run_naive() -> Iterator[float]:
        for done in places:
            naive.generate([prompt + outputs[0].token_ids[:done]], kit.greedy(1))
            yield naive.steps[0].seconds

    # Every run generates the same tokens as the first.
    ways = {CACHED: run_cached, NAIVE: lambda: list(run_naive())}
    steps = measure.turns(ways, plan.repeats, warmup=0)
    about = {"prompt": len(prompt), "counts": list(plan.growth), "places": places, "steps": steps}
    yield about | {"proof": [subject.prove([output]) for output in outputs][-1]}


def prompts(subject: Subject, plan: Any) -> Iterator[Group]:
    for length in plan.prompts:
        yield kit.compare(subject, engines(subject), [(length, plan.answer)], plan.repeats)[0]


def null(subject: Subject, plan: Any) -> Iterator[Group]:
    """A single token: the cache holds nothing yet that could help."""
    for length in plan.null_prompts:
        yield kit.compare(subject, engines(subject), [(length, 1)], plan.null_repeats)[0]


def predicted(row: Row) -> float:
    costs = naive_costs if row.variant == NAIVE else static_costs
    return row.least(costs(row.config, row.kind, row.lengths))


def counted(results: Results, **where: str) -> Iterator[Row]:
    """The first tokens of each long answer; naive steps that were not run are interpolated."""
    for row in results.groups("growth", **where):
        for count in row["counts"]:
            naive = [
                np.interp(range(count), row["places"], run).sum() for run in row["steps"][NAIVE]
            ]
            taken = {NAIVE: naive, CACHED: [sum(run[:count]) for run in row["steps"][CACHED]]}
            more = {"lengths": [[row["prompt"], count, 1]], "seconds": taken}
            yield Row(results, {**row.group, **more})


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts, for GPT-2 in float32."""
    where = {"model": results["growth"][0]["model"], "dtype": "float32"}
    alike = "the naive engine's long passes come nearer to their limit than single rows"
    answers = [(row, alike) for row in counted(results, **where)]
    null = results.groups("null", **where)[0], "the control: both do the same work"
    for row, why in (*answers, null):
        tokens = f"{row.tokens:,} tokens" if row.tokens > 1 else "a single token"
        yield faster(f"gain over {tokens}", row, (NAIVE, CACHED), predicted, why)
    cached, why = answers[-1][0].of(CACHED), "a product of one row does not reach the bandwidth"
    yield speed("decoding with the cache", cached, predicted, why)


COLUMNS: dict[str, rows.Column] = {
    "new tokens": "tokens",
    "gain (predicted)": rows.gain(NAIVE, predicted, CACHED),
}
PROMPTS = "model | dtype | prompt | naive, ms | cached, ms | gain (predicted) | same tokens"
TABLES = rows.tables(
    COLUMNS,
    f"""
    growth < counted: model | dtype | new tokens | naive, tok/s | cached, tok/s
      | gain (predicted) | same tokens
    prompts: {PROMPTS}
    null: {PROMPTS}
    """,
    counted=counted,
    profile=rows.operators,
    claims=closing(claims),
)


def growth_chart(results: Results) -> Figure:
    """Time of a step by its place in the answer; cached: the median of the steps around it."""
    (row, *_) = first("growth")(results)
    steps, places = row["steps"], row["places"]
    around = [slice(max(place - 12, 1), place + 13) for place in places]
    past = [row["prompt"] + place for place in places]
    seconds = {
        NAIVE: [median(run[at] for run in steps[NAIVE]) for at in range(len(places))],
        CACHED: [median(s for run in steps[CACHED] for s in run[near]) for near in around],
        "limit, naive": [row.least([forward_cost(row.config, row.kind, n)]) for n in past],
        "limit, cached": [row.least([forward_cost(row.config, row.kind, 1, n)]) for n in past],
    }
    return charts.lines(
        "Without the cache each token costs more than the one before",
        "tokens already generated (GPT-2 124M shape, float32)",
        "milliseconds for the next token",
        places,
        {name: [1e3 * s for s in times] for name, times in seconds.items()},
        dashed=("limit, naive", "limit, cached"),
    )


def headline(results: Results) -> str:
    row = list(counted(results, model=results["growth"][0]["model"], dtype="float32"))[-1]
    gain = row.gain(NAIVE, CACHED)
    return f"{gain:.1f}x the naive engine over {row.tokens} tokens (GPT-2 124M shape, float32)"


PROFILED = {"Before, the naive engine": NaiveEngine, "After, with the cache": Engine}
WORK = kit.cases(
    Case(growth, models=None),
    Case(prompts, models=None),
    Case(null),
    Case(kit.profile(PROFILED), dtypes=1),
)
CHARTS = {"growth": growth_chart}
BENCHMARK = kit.Benchmark("stage02_kv_cache", __doc__, FULL, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
