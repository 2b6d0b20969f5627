"""What the KV cache buys, where it buys nothing, and what it costs:
`python -m stage02_kv_cache.benchmark`.

The naive engine takes minutes for a thousand tokens, but the time of its steps grows smoothly. So
of a long answer only every hundredth naive step is run and timed, and those between are
interpolated. Every whole answer is proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from shared import charts, cli, kit
from shared.kit import Results, Row, Subject
from shared.roofline import forward_cost, naive_costs, static_costs
from stage01_forward.engine import Engine as NaiveEngine

from .engine import Engine

NAIVE, CACHED = "naive", "cached"
PROMPT, STRIDE = 5, 100  # tokens; STRIDE: between two naive steps that are run
COUNTS = (200, 500, 1000)  # new tokens


def measure(bench: kit.Bench) -> None:
    pairs = ("gpt2", "float32"), ("gpt2", "bfloat16"), ("stories", "float32")
    for subject in bench.subjects(*pairs):
        engines = {NAIVE: NaiveEngine(subject.model), CACHED: Engine(subject.model)}
        growth(bench, subject, engines, bench.sizes(COUNTS[0], COUNTS[-1])[-1])
        for lengths in bench.sizes((PROMPT, 1), (512, 1), (512, 25)):
            bench.answers("prompts", subject, engines, [lengths])


def growth(bench: kit.Bench, subject: Subject, engines: dict[str, Any], count: int) -> None:
    """Seconds of every cached step of a long answer, and of some naive steps."""
    places, outputs = [*range(0, count, STRIDE), count - 1], list[Any]()
    longer = subject.prompts([PROMPT + done for done in places], "longer")

    def run(name: str, prompts: list[list[int]], count: int) -> dict[str, Any]:
        outputs.extend(engines[name].generate(prompts, kit.greedy(count)))
        return {"steps": [step.seconds for step in engines[name].steps]}

    def proof() -> dict[str, Any]:
        return subject.prove([o.prompt_ids for o in outputs], [o.token_ids for o in outputs])

    ways = {CACHED: partial(run, CACHED, longer[:1], count), NAIVE: partial(run, NAIVE, longer, 1)}
    bench.row("growth", ways, 2, 0, proof, **subject.about, places=places)


# ---- tables and chart ---------------------------------------------------------------------------


def answers(results: Results) -> Iterator[tuple[Row, int, int, float, float]]:
    """Of every answer: its row, tokens of prompt and answer, seconds of either engine. Naive steps
    that were not run are interpolated."""
    for row in results.rows("growth"):
        cached, naive = (np.median(row["steps"][name], axis=0) for name in (CACHED, NAIVE))
        naive = np.interp(range(len(cached)), row["places"], naive)
        for count in (count for count in COUNTS if count <= len(cached)):
            yield row, PROMPT, count, naive[:count].sum(), cached[:count].sum()
    for row in results.rows("prompts"):
        yield row, *row.lengths[0], row.median(NAIVE), row.median(CACHED)


def predicted(row: Row, prompt: int, count: int) -> tuple[float, float]:
    """Least seconds of an answer with the cache, and the gain over the naive engine's."""
    lengths = [(prompt, count)]
    cached = row.least(static_costs(row.config, row.kind, lengths))
    return cached, row.least(naive_costs(row.config, row.kind, lengths)) / cached


def tables(results: Results) -> kit.Tables:
    lines = [
        {
            "model": row["model"], "dtype": row["dtype"], "prompt": prompt, "new tokens": count,
            "naive, tok/s": f"{count / naive:,.1f}", "cached, tok/s": f"{count / cached:,.1f}",
            "gain": f"{naive / cached:.2f}x",
            "predicted": f"{predicted(row, prompt, count)[1]:.2f}x", "same tokens": row.proof,
        }
        for row, prompt, count, naive, cached in answers(results)
    ]  # fmt: skip
    return {"answers": lines, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts, for GPT-2 in float32."""
    hand = {200: 7.23, 500: 17.5, 1000: 34.6, 1: 1.0}
    for row, prompt, count, naive, cached in answers(results):
        if (row["model"], row["dtype"], prompt) != ("gpt2", "float32", PROMPT):
            continue
        least, gain = predicted(row, prompt, count)
        what, why = "the control: a single token", "both do the same work"
        if count > 1:
            what = f"gain over {count:,} tokens"
            why = "long naive passes come nearer to their limit than single rows"
        yield kit.claim(what, hand[count], gain, naive / cached, "x", why)
        if count == COUNTS[-1]:
            here, why = count / least, "a row reads below the bandwidth"
            yield kit.claim("decoding with the cache", 75.3, here, count / cached, "tok/s", why)


def chart(results: Results) -> charts.Figure:
    """Time of a step by its place in the answer; cached: the median of the steps around it."""
    (row, *_) = results.rows("growth")
    places, cost = row["places"], partial(forward_cost, row.config, row.kind)
    naive, cached = (np.median(row["steps"][name], axis=0) for name in (NAIVE, CACHED))
    drawn = {
        NAIVE: naive,
        CACHED: [np.median(cached[max(place - 12, 1) : place + 13]) for place in places],
        "limit, naive": [row.least(cost(PROMPT + place)) for place in places],
        "limit, cached": [row.least(cost(1, PROMPT + place)) for place in places],
    }
    return charts.lines(
        "Without the cache each token costs more than the one before",
        "tokens already generated (GPT-2 124M shape, float32)", "milliseconds for the next token",
        places, {name: [1e3 * float(s) for s in times] for name, times in drawn.items()},
        dashed=("limit, naive", "limit, cached"),
    )  # fmt: skip


def headline(results: Results) -> Iterator[str]:
    for _, _, count, naive, cached in answers(results):
        if count == COUNTS[-1]:
            yield f"{naive / cached:.0f}x the naive engine over {count:,} tokens"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage02_kv_cache", __doc__, measure, tables))
