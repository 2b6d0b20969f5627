"""What the KV cache buys, where it buys nothing, and what it costs:
`python -m stage02_kv_cache.benchmark`.

The naive engine needs minutes for a thousand tokens, and its steps grow smoothly. So every 50th of
its steps over a long answer runs and is timed, and those between are interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from shared import cli, measure
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, first, median
from shared.roofline import forward_cost, naive_costs, static_costs
from stage01_forward.engine import Engine as NaiveEngine
from stage01_forward.generation import Output

from .engine import Engine

STAGE = "stage02_kv_cache"
NAIVE, CACHED = "naive", "cached"


@dataclass(frozen=True)
class Sizes(kit.Plan):
    models: tuple[str, ...] = ("gpt2", "stories")
    growth: tuple[int, ...] = (200, 500, 1000)  # new tokens after a prompt of 5
    stride: int = 50  # of the naive steps
    growth_repeats: tuple[int, int] = (1, 2)  # naive, cached
    prompts: tuple[int, ...] = (64, 256, 512)
    answer: int = 25
    prompt_repeats: tuple[int, int] = (1, 2)
    null_prompts: tuple[int, ...] = (5, 64, 512)  # before a single token
    null_repeats: int = 3
    peers: tuple[tuple[int, int], ...] = ((512, 1), (64, 64))  # prefill, decode
    peer_repeats: int = 3
    profiled: tuple[int, int] = (64, 16)


FULL = Sizes()
QUICK = kit.quick(FULL)


def engines(subject: Subject) -> dict[str, NaiveEngine | Engine]:
    return {NAIVE: NaiveEngine(subject.model), CACHED: Engine(subject.model)}


def named(repeats: tuple[int, int]) -> dict[str, int]:
    return dict(zip((NAIVE, CACHED), repeats, strict=True))


def growth(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Seconds of every step of the cached engine over a long answer, and of some naive ones."""
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

    # The first run has the tokens of the others.
    ways = {CACHED: run_cached, NAIVE: lambda: list(run_naive())}
    steps = measure.turns(ways, named(plan.growth_repeats), warmup=0)
    about = {"prompt": len(prompt), "counts": list(plan.growth), "places": places, "steps": steps}
    yield about | {"proof": [subject.prove([output]) for output in outputs][-1]}


def prompts(subject: Subject, plan: Sizes) -> Iterator[Group]:
    for length in plan.prompts:
        lengths, often = [(length, plan.answer)], named(plan.prompt_repeats)
        yield kit.compare(subject, engines(subject), lengths, often)[0]


def null(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A single token: nothing was kept yet that could help."""
    for length in plan.null_prompts:
        yield kit.compare(subject, engines(subject), [(length, 1)], plan.null_repeats)[0]


def peers(subject: Subject, plan: Sizes) -> Iterator[Group]:
    for lengths in plan.peers:
        yield kit.beside_peers(subject, Engine(subject.model), [lengths], plan.peer_repeats)


def profile(subject: Subject, plan: Sizes) -> Iterator[Group]:
    prompt, count = plan.profiled
    titles = {NAIVE: "Before, the naive engine", CACHED: "After, with the cache"}
    for name, engine in engines(subject).items():
        run = partial(engine.generate, subject.prompts([prompt], "profile"), kit.greedy(count))
        yield kit.profiled(subject, titles[name], run)


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


def step_times(results: Results) -> Iterator[dict[str, float]]:
    """Seconds of a step by its place in the answer, and at least; of the cached engine those of the
    steps around it."""
    (row, *_) = first("growth")(results)
    for number, place in enumerate(row["places"]):
        past, around = row["prompt"] + place, slice(max(place - 12, 1), place + 13)
        yield {
            "place": place,
            NAIVE: median(run[number] for run in row["steps"][NAIVE]),
            CACHED: median(taken for run in row["steps"][CACHED] for taken in run[around]),
            "limit, naive": row.least([forward_cost(row.config, row.kind, past)]),
            "limit, cached": row.least([forward_cost(row.config, row.kind, 1, past)]),
        }


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts, for GPT-2 in float32."""
    where = {"model": results["growth"][0]["model"], "dtype": "float32"}
    alike = "both engines reach similar shares of their limits"
    answers = [(row, alike) for row in counted(results, **where)]
    null = results.groups("null", **where)[0], "the control: both do the same work"
    for row, why in (*answers, null):
        tokens = f"{row.tokens:,} tokens" if row.tokens > 1 else "a single token"
        naive, cached = row.of(NAIVE), row.of(CACHED)
        limits = predicted(naive) / predicted(cached)
        yield Claim(f"gain over {tokens}", limits, naive.median / cached.median, "x", why)
    cached, why = answers[-1][0].of(CACHED), "a product of one row reads at half of the bandwidth"
    least = cached.tokens / predicted(cached)
    yield Claim("decoding with the cache", least, cached.rate.median, "tok/s", why)


COLUMNS: dict[str, rows.Column] = {
    "new tokens": "tokens",
    "gain (predicted)": rows.gain(NAIVE, predicted, CACHED),
    "same tokens": lambda row: row.of(CACHED).proof,
}
GROWTH = "model | new tokens | naive, tok/s | cached, tok/s | gain (predicted) | same tokens"
PROMPTS = "model | dtype | prompt | naive, ms | cached, ms | gain (predicted) | same tokens"
TABLES = rows.tables(
    COLUMNS,
    f"""
    growth: {GROWTH}
    growth_bfloat16: {GROWTH}
    prompts: {PROMPTS}
    null: {PROMPTS}
    prefill < peers: dtype | prompt | {rows.PREFILL}
    decode < decoders: dtype | {rows.DECODE}
    """,
    growth=partial(counted, dtype="float32"),
    growth_bfloat16=partial(counted, dtype="bfloat16"),
    decoders=lambda results: [row for row in results.rows("peers") if row.tokens > 1],
    profile=rows.operators,
    claims=closing(claims),
)
LIMITS = ("limit, naive", "limit, cached")
CHARTS = {
    "growth": rows.lines(
        "Without the cache each token costs more than the one before",
        ("tokens already generated (GPT-2 124M shape, float32)", "milliseconds for the next token"),
        step_times,
        "place",
        {name: name for name in (NAIVE, CACHED, *LIMITS)},
        unit=1e3,
        dashed=LIMITS,
    )
}


def headline(results: Results) -> str:
    row = list(counted(results, model=results["growth"][0]["model"], dtype="float32"))[-1]
    gain = row.of(NAIVE).median / row.of(CACHED).median
    return f"{gain:.1f}x the naive engine over {row.tokens} tokens (GPT-2 124M shape, float32)"


ABOUT = "Measures the engine with and without KV cache on this CPU, beside transformers."
WORK = kit.cases(
    Case(growth, models=None), Case(prompts, models=None), Case(null), Case(peers),
    Case(profile, dtypes=1),
)  # fmt: skip
BENCHMARK = kit.Benchmark(STAGE, ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
