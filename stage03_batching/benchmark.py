"""What a batch buys, where it buys nothing, and what its padding costs:
`python -m stage03_batching.benchmark`. Every answer that is timed is proved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from shared import charts, cli, kit
from shared.kit import Results, Row
from shared.roofline import Cost, forward_cost, static_costs
from stage02_kv_cache.engine import Engine as SingleEngine

from .engine import Engine

SINGLE, BATCH = "single", "batch"
PROMPT, ANSWER, ROWS = 64, 32, 32  # tokens, and sequences where they are compared
SHORT, LONG_ANSWER, LONG_PROMPT = 16, 256, 512  # tokens of all rows but one, and of that one


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32"), ("gpt2", "bfloat16")):
        for rows in bench.sizes(1, 2, 4, 8, 16, 32, 64, 128):
            engines: dict[str, Any] = {BATCH: Engine(subject.model, max_batch=rows)}
            if rows in (1, ROWS):
                engines[SINGLE] = SingleEngine(subject.model)
            equal = [(PROMPT, ANSWER if rows < 128 else 8)] * rows  # wide prompts take seconds
            bench.answers("scaling", subject, engines, equal, 2, steps)
        if subject.about["dtype"] == "float32":
            for what, long in bench.sizes(("answer", LONG_ANSWER), ("prompt", LONG_PROMPT)):
                equal = [(SHORT * (ROWS - 1) + long + row) // ROWS for row in range(ROWS)]
                for kind, counts in (("equal", equal), ("one long", [SHORT] * (ROWS - 1) + [long])):
                    pairs: Any = [(SHORT, n) if what == "answer" else (n, SHORT) for n in counts]
                    engines = {BATCH: Engine(subject.model, max_batch=ROWS)}
                    bench.answers("waste", subject, engines, pairs, 1, steps, what=what, kind=kind)


def steps(engine: Any) -> dict[str, Any]:
    """Seconds of a decode step, and the share of the tokens computed in vain."""
    seconds = [step.seconds for step in engine.steps if not step.prefill_tokens]
    useful = sum(step.prefill_tokens + step.decode_tokens for step in engine.steps)
    wasted = sum(step.wasted_tokens for step in engine.steps)
    return {"decode": median(seconds or [0.0]), "wasted": wasted / (useful + wasted)}


def rows_of(results: Results, dtype: str) -> dict[int, Row]:
    """Batches of equal rows, by their number."""
    return {len(row.lengths): row for row in results.rows("scaling", dtype=dtype)}


def cost(row: Row) -> Cost:
    """Of a decode step halfway through a batch of equal rows."""
    prompt, answer = row.lengths[0]
    return forward_cost(row.config, row.kind, 1, prompt + (answer - 2) // 2, rows=len(row.lengths))


def decode(row: Row) -> float:
    """Tokens per second of the decode steps."""
    return len(row.lengths) / row.median(BATCH, "decode")


def limit(row: Row) -> float:
    return len(row.lengths) / row.least(cost(row))


def predicted(row: Row) -> float:
    """The gain of a batch over one after the other."""
    costs = (static_costs(row.config, row.kind, row.lengths, n) for n in (1, len(row.lengths)))
    singly, together = map(row.least, costs)
    return singly / together


def uneven(results: Results) -> Iterator[tuple[Row, float, float]]:
    """Each batch with a long row, and its tok/s over equal rows: measured, and predicted."""
    for row in results.rows("waste", kind="one long"):
        for equal in results.rows("waste", kind="equal", what=row["what"]):
            costs = (static_costs(r.config, r.kind, r.lengths, ROWS) for r in (row, equal))
            (least, base), more = map(row.least, costs), row.tokens / equal.tokens
            yield row, more * equal.median(BATCH) / row.median(BATCH), more * base / least


def tables(results: Results) -> kit.Tables:
    scaling = [
        {
            "dtype": row["dtype"], "rows": len(row.lengths), "decode, tok/s": f"{decode(row):,.1f}",
            "limit": f"{limit(row):,.0f}", "step, ms": f"{1e3 * row.median(BATCH, 'decode'):.1f}",
            "bound by": max(times, key=times.__getitem__),
        }
        for row in results.rows("scaling") for times in [cost(row).times(row.limits, row.kind)]
    ]  # fmt: skip
    waste = [
        {
            "32 rows": f"one long {row['what']}", "wasted": f"{row.median(BATCH, 'wasted'):.0%}",
            "tok/s": row.rate(BATCH), "over equal rows (predicted)": f"{over:.2f}x ({least:.2f}x)",
        }
        for row, over, least in uneven(results)
    ]  # fmt: skip
    return {"scaling": scaling, "waste": waste, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts."""
    few = "products of few rows reach neither the bandwidth nor the peak"
    for dtype in ("float32", "bfloat16"):
        rows = rows_of(results, dtype)
        if {1, 8} <= rows.keys():
            here, measured = limit(rows[8]) / limit(rows[1]), decode(rows[8]) / decode(rows[1])
            yield kit.claim(f"8 rows, tok/s over one row, {dtype}", 7.4, here, measured, "x", few)
        if (row := rows.get(128)) and dtype == "float32":
            why = "products stay below the peak"
            yield kit.claim("decoding 128 rows", 801, limit(row), decode(row), "tok/s", why)
    slow = "prompts one by one are short passes, far from their limit; 32 together are nearer"
    for count, hand, why in ((1, 1.0, "the control: the same work"), (ROWS, 4.71, slow)):
        if row := rows_of(results, "float32").get(count):
            what, gain = f"gain of a batch of {count}", row.gain(SINGLE, BATCH)
            yield kit.claim(what, hand, predicted(row), gain, "x", why)
    for row, over, least in uneven(results):
        hand = {"answer": 0.17, "prompt": 0.10}[row["what"]]
        yield kit.claim(f"one long {row['what']}, over equal rows", hand, least, over)


def chart(results: Results) -> charts.Figure:
    series: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        rows = rows_of(results, dtype)
        series[dtype] = [*map(decode, rows.values())]
        series[f"limit, {dtype}"] = [*map(limit, rows.values())]
    return charts.lines(
        "More rows in a step cost little, until the processor has enough to do",
        "sequences in the batch (GPT-2 124M shape)", "decode, tok/s",
        [*rows], series,
        dashed=[name for name in series if name.startswith("limit")], log_x=True, log_y=True,
    )  # fmt: skip


def headline(results: Results) -> Iterator[str]:
    if row := rows_of(results, "float32").get(ROWS):
        yield f"{ROWS} prompts as one batch: {row.gain(SINGLE, BATCH):.1f}x one by one"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage03_batching", __doc__, measure, tables))
