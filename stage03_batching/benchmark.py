"""What a batch buys, where it buys nothing, and what its padding costs:
`python -m stage03_batching.benchmark`. Every answer that is timed is proved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from shared import charts, cli, kit
from shared.kit import Results, Row, Subject
from shared.roofline import Cost, forward_cost, static_costs
from stage02_kv_cache.engine import Engine as SingleEngine

from .engine import Engine

STAGE = "stage03_batching"
SINGLE, BATCH = "single", "batch"
PROMPT, ANSWER, ROWS = 64, 32, 32  # tokens, and sequences where they are compared
SHORT, LONG_ANSWER, LONG_PROMPT = 16, 256, 512  # tokens of all rows but one, and of that one


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32"), ("gpt2", "bfloat16")):
        for rows in bench.sizes(1, 2, 4, 8, 16, 32, 64, 128):
            equal = [(PROMPT, ANSWER if rows < 128 else 8)] * rows  # wide prompts take seconds
            run(bench, subject, "scaling", equal, 2)
        for rows in bench.sizes(1, ROWS):
            single = {SINGLE: SingleEngine(subject.model)}
            run(bench, subject, "single", [(PROMPT, ANSWER)] * rows, 3 if rows == 1 else 1, single)
        if subject.about["dtype"] == "float32":
            for what, long in bench.sizes(("answer", LONG_ANSWER), ("prompt", LONG_PROMPT)):
                equal = [(SHORT * (ROWS - 1) + long + row) // ROWS for row in range(ROWS)]
                for kind, counts in (("equal", equal), ("one long", [SHORT] * (ROWS - 1) + [long])):
                    pairs = [(SHORT, n) if what == "answer" else (n, SHORT) for n in counts]
                    run(bench, subject, "waste", pairs, 1, what=what, kind=kind)


def run(
    bench: kit.Bench,
    subject: Subject,
    case: str,
    lengths: Any,
    repeats: int,
    others: Any = (),
    **about: Any,
) -> None:
    engines = dict(others) | {BATCH: Engine(subject.model, max_batch=len(lengths))}
    bench.answers(case, subject, engines, lengths, repeats, steps, **about)


def steps(engine: Any) -> dict[str, Any]:
    """Of a run: seconds of a decode step, and the tokens that all steps computed."""
    seconds = [step.seconds for step in engine.steps if not step.prefill_tokens]
    useful = sum(step.prefill_tokens + step.decode_tokens for step in engine.steps)
    wasted = sum(step.wasted_tokens for step in engine.steps)
    return {"decode": median(seconds or [0.0]), "useful": useful, "wasted": wasted}


# ---- tables and chart ---------------------------------------------------------------------------


def cost(row: Row) -> Cost:
    """Of a decode step halfway through a batch of equal rows."""
    ((prompt, answer), *_) = row.lengths
    return forward_cost(row.config, row.kind, 1, prompt + (answer - 2) // 2, rows=len(row.lengths))


def decode(row: Row) -> float:
    """Tokens per second of the decode steps."""
    return len(row.lengths) / row.median(BATCH, "decode")


def limit(row: Row) -> float:
    return len(row.lengths) / row.least(cost(row))


def predicted(row: Row) -> float:
    """The gain of a batch over one after the other."""
    singly, together = (
        row.least(static_costs(row.config, row.kind, row.lengths, size))
        for size in (1, len(row.lengths))
    )
    return singly / together


def wasted(row: Row) -> str:
    done, vain = row.median(BATCH, "useful"), row.median(BATCH, "wasted")
    return f"{done + vain:,.0f} ({vain / (done + vain):.0%})"


def uneven(results: Results) -> Iterator[tuple[Row, float, float]]:
    """Each batch with a long row, and its tok/s over equal rows: measured, and predicted."""
    for row in results.rows("waste", kind="one long"):
        for equal in results.rows("waste", kind="equal", what=row["what"]):
            more = row.tokens / equal.tokens
            least, base = (
                r.least(static_costs(r.config, r.kind, r.lengths, ROWS)) for r in (row, equal)
            )
            yield row, more * equal.median(BATCH) / row.median(BATCH), more * base / least


def tables(results: Results) -> kit.Tables:
    scaling = [
        {
            "dtype": row["dtype"], "rows": len(row.lengths), "decode, tok/s": f"{decode(row):,.1f}",
            "limit": f"{limit(row):,.0f}", "step, ms": f"{1e3 * row.median(BATCH, 'decode'):.1f}",
            "bound by": cost(row).bound(row.limits, row.kind),
        }
        for row in results.rows("scaling")
    ]  # fmt: skip
    waste = [
        {
            "rows": f"{ROWS}, {row['kind']} {row['what']}", "tokens computed (wasted)": wasted(row),
            "tok/s": row.rate(BATCH), "over equal rows": f"{over:.2f}x",
            "predicted": f"{least:.2f}x",
        }
        for row, over, least in uneven(results)
    ]  # fmt: skip
    return {"scaling": scaling, "waste": waste, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts."""
    few = "products of few rows reach neither the bandwidth nor the peak"
    for dtype in ("float32", "bfloat16"):
        rows = {len(row.lengths): row for row in results.rows("scaling", dtype=dtype)}
        if {1, 8} <= rows.keys():
            here, measured = limit(rows[8]) / limit(rows[1]), decode(rows[8]) / decode(rows[1])
            yield kit.claim(f"8 rows, tok/s over one row, {dtype}", 7.4, here, measured, "x", few)
        if 128 in rows and dtype == "float32":
            what, why = "decoding 128 rows", "products stay below the peak"
            yield kit.claim(what, 801, limit(rows[128]), decode(rows[128]), "tok/s", why)
    for row in results.rows("single", dtype="float32"):
        hand, why = (1.0, "the control: the same work") if len(row.lengths) == 1 else (4.71, few)
        what = f"gain of a batch of {len(row.lengths)}"
        yield kit.claim(what, hand, predicted(row), row.gain(SINGLE, BATCH), "x", why)
    for row, over, least in uneven(results):
        hand = {"answer": 0.17, "prompt": 0.10}[row["what"]]
        yield kit.claim(f"one long {row['what']}, over equal rows", hand, least, over)


def chart(results: Results) -> Figure:
    series: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        rows = results.rows("scaling", dtype=dtype)
        series |= {dtype: [*map(decode, rows)], f"limit, {dtype}": [*map(limit, rows)]}
    return charts.lines(
        "More rows in a step cost little, until the processor has enough to do",
        "sequences in the batch (GPT-2 124M shape)", "decode, tok/s",
        [len(row.lengths) for row in rows], series,
        dashed=[name for name in series if name.startswith("limit")], log_x=True, log_y=True,
    )  # fmt: skip


def headline(results: Results) -> str:
    for row in results.rows("single", dtype="float32")[1:]:
        return f"{len(row.lengths)} prompts as one batch: {row.gain(SINGLE, BATCH):.1f}x one by one"
    return kit.UNMEASURED


main = partial(kit.main, STAGE, __doc__, measure, tables)

if __name__ == "__main__":
    cli.run(main)
