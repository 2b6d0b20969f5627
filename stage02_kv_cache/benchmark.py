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
import torch
from matplotlib.figure import Figure

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.forecast import naive_costs, static_costs
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, median
from shared.checkpoint import PRESETS
from shared.roofline import forward_cost
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
    peaks: bool = True


FULL = Sizes()
QUICK = kit.quick(FULL, peaks=False)


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

    def run_naive() -> list[float]:
        taken = []
        for done in places:
            naive.generate([prompt + outputs[0].token_ids[:done]], kit.greedy(1))
            taken.append(naive.steps[0].seconds)
        return taken

    ways = {CACHED: run_cached, NAIVE: run_naive}  # the first run has the tokens of the others
    steps = measure.turns(ways, named(plan.growth_repeats), warmup=0)
    about = {**subject.about, "prompt": len(prompt), "counts": list(plan.growth)}
    yield {
        **about,
        "proof": [subject.prove([output]) for output in outputs][-1],
        "places": places,
        "steps": steps,
    }


def prompts(subject: Subject, plan: Sizes) -> Iterator[Group]:
    for prompt in plan.prompts:
        lengths = [(prompt, plan.answer)]
        yield kit.compare(subject, engines(subject), lengths, named(plan.prompt_repeats))[0]


def null(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A single token: nothing was kept yet that could help."""
    for prompt in plan.null_prompts:
        yield kit.compare(subject, engines(subject), [(prompt, 1)], plan.null_repeats)[0]


def peers(subject: Subject, plan: Sizes) -> Iterator[Group]:
    for lengths in plan.peers:
        yield kit.beside_peers(subject, Engine(subject.model), [lengths], plan.peer_repeats)


def profile(subject: Subject, plan: Sizes) -> Iterator[Group]:
    prompt, count = plan.profiled
    titles = {NAIVE: "Before, the naive engine", CACHED: "After, with the cache"}
    for name, engine in engines(subject).items():
        run = partial(engine.generate, subject.prompts([prompt], "profile"), kit.greedy(count))
        yield kit.profiled(subject, titles[name], run)


def memory(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Peak of a fresh process: a stage's own command on a prompt that nearly fills the context.

    Without a tokenizer of its own the model reads bytes: a thousand letters are as many tokens.
    """
    options = ["--model", "gpt2", "--random-weights", "--linear", "plain", "--max-tokens", "2"]
    for name, stage in ((NAIVE, "stage01_forward"), (CACHED, STAGE)) if plan.peaks else ():
        peak = measure.peak_memory(stage, ["x" * 1000, *options])
        yield {**subject.about, "name": f"{name} engine", "bytes": peak}


# ---- tables and charts --------------------------------------------------------------------------


def predicted(row: Row) -> float:
    costs = naive_costs if row.variant == NAIVE else static_costs
    return row.least(costs(row.config, row.kind, row.lengths))


def counted(results: Results, **where: str) -> Iterator[Row]:
    """The first tokens of each long answer; naive steps that were not run are interpolated."""
    for row in results.groups("growth", **where):
        places, steps = row["places"], row["steps"]
        for count in row["counts"]:
            every = [np.interp(range(count), places, run).sum() for run in steps[NAIVE]]
            seconds = {NAIVE: every, CACHED: [sum(run[:count]) for run in steps[CACHED]]}
            yield Row(
                results, {**row.group, "lengths": [[row["prompt"], count, 1]], "seconds": seconds}
            )


def megabytes(kind: torch.dtype, tokens: int) -> float:
    """Of the cache."""
    return PRESETS["gpt2"].kv_bytes_per_token(kind) * tokens / 1e6


def memory_table(results: Results) -> str:
    """By arithmetic, and below it the peaks of fresh processes in float32, where they were
    taken."""
    config = PRESETS["gpt2"]
    lines = [
        {
            "dtype": kit.label(kind),
            "weights, MB": f"{config.parameter_count * kind.itemsize / 1e6:.0f}",
            "cache a token, KiB": f"{config.kv_bytes_per_token(kind) / 1024:.0f}",
            "cache of 1,024 tokens, MB": f"{megabytes(kind, 1024):.0f}",
        }
        for kind in (torch.float32, torch.bfloat16)
    ]
    name, found = "engine, peak of a process with 1,000 tokens", results.groups("memory")
    peaks = [{name: row["name"], "MB": f"{row['bytes'] / 1e6:,.0f}"} for row in found]
    return "\n\n".join(rows.table(found) for found in (lines, peaks) if found)


COLUMNS: dict[str, rows.Column] = {
    "new tokens": "tokens",
    "prompt": lambda row: row.lengths[0][0],
    "gain (predicted)": rows.gain(NAIVE, predicted, CACHED),
    "same tokens": lambda row: row.of(CACHED).proof,
}
GROWTH = "model | new tokens | naive, tok/s | cached, tok/s | gain (predicted) | same tokens"
PROMPTS = "model | dtype | prompt | naive, ms | cached, ms | gain (predicted) | same tokens"
DRAW = rows.tables(
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
    decoders=lambda results: [r for r in results.rows("peers") if r.tokens > 1],
    memory=memory_table,
    profile=rows.operators,
)


def growth_chart(results: Results) -> Figure:
    """Time of a step by its place in the answer; for the cached engine of the steps around it."""
    row = results.groups("growth", dtype="float32")[0]
    places, naive, cached = row["places"], row["steps"][NAIVE], row["steps"][CACHED]
    around = [[s for run in cached for s in run[max(at - 12, 1) : at + 13]] for at in places]
    past = [row["prompt"] + at for at in places]
    seconds = {
        NAIVE: [median(runs) for runs in zip(*naive, strict=True)],
        CACHED: [median(some) for some in around],
        "limit, naive": [row.least([forward_cost(row.config, row.kind, n)]) for n in past],
        "limit, cached": [row.least([forward_cost(row.config, row.kind, 1, n)]) for n in past],
    }
    return charts.lines(
        "Without the cache each token costs more than the one before",
        "tokens already generated (GPT-2 124M shape, float32)",
        "milliseconds for the next token",
        places,
        {name: [value * 1e3 for value in values] for name, values in seconds.items()},
        dashed=("limit, naive", "limit, cached"),
    )


def prompts_chart(results: Results) -> Figure:
    found = results.groups("prompts", model=results["prompts"][0]["model"], dtype="float32")
    title = f"{found[0].tokens} tokens after a prompt: the longer it is, the more the cache saves"
    groups = [f"prompt of {row.lengths[0][0]}" for row in found]
    series = {f"{name} engine": [row.of(name).median for row in found] for name in (NAIVE, CACHED)}
    return charts.bars(title, "seconds (GPT-2 124M shape, float32)", groups, series, digits=2)


def memory_chart(results: Results) -> Figure:
    positions = [0, 256, 512, 768, 1024]
    kept = {
        f"{kit.label(kind)} cache": [megabytes(kind, at) for at in positions]
        for kind in (torch.float32, torch.bfloat16)
    }
    weights = PRESETS["gpt2"].parameter_count * 4 / 1e6
    title = (
        f"One sequence: up to {kept['float32 cache'][-1]:.0f} MB beside {weights:.0f} MB of weights"
    )
    x, y = "tokens of context (GPT-2 124M shape)", "MB of keys and values"
    return charts.lines(title, x, y, positions, kept)


def headline(results: Results) -> str:
    row = list(counted(results, model=results["growth"][0]["model"], dtype="float32"))[-1]
    gain = row.of(NAIVE).median / row.of(CACHED).median
    return f"{gain:.1f}x the naive engine over {row.tokens} tokens (GPT-2 124M shape, float32)"


ABOUT = "Measures the engine with and without KV cache on this CPU, beside transformers."
WORK = kit.cases(
    Case(growth, models=None),
    Case(prompts, models=None),
    Case(null),
    Case(peers),
    Case(profile, dtypes=1),
    Case(memory, dtypes=1),
)
CHARTS = {"growth": growth_chart, "prompts": prompts_chart, "memory": memory_chart}
BENCHMARK = kit.Benchmark(STAGE, ABOUT, FULL, QUICK, WORK, DRAW, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
