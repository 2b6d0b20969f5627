"""What a batch buys, where it buys nothing, and what its padding costs:
`python -m stage03_batching.benchmark`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing, faster
from shared.bench.kit import Case, Group, Lengths, Runs, Subject
from shared.bench.rows import Results, Row, median, ms
from shared.measure import Summary
from shared.roofline import Cost, forward_cost, static_costs
from stage02_kv_cache.engine import Engine as SingleEngine

from .engine import Engine

SINGLE, BATCH = "single", "batch"


FULL = kit.plan(
    models=("gpt2",), dtypes=kit.BOTH, repeats=2,
    prompt=64, answer=32, batches=(1, 2, 4, 8, 16, 32, 64),
    # Once, and with few tokens: its prompts alone take 10 seconds, and their proof as long.
    wide=128, wide_answer=8,
    single=((1, 3), (32, 2)),  # sequences, repeats: the null control, and the win
    waste_rows=32, short=16, long_answer=256, long_prompt=512,  # all rows short but one
    profiled=(32, 8, 64),  # nearly all decode
)  # fmt: skip


def alternated(
    subject: Subject, workloads: Mapping[str, Lengths], repeats: int, **fields: Any
) -> Iterator[Group]:
    """Run several workloads in turn, each as one batch, and note the seconds of every pass."""
    engine = Engine(subject.model, max_batch=max(map(len, workloads.values())))
    runs = {
        name: Runs(engine, subject.prompts(prompt for prompt, _ in pairs), [n for _, n in pairs])
        for name, pairs in workloads.items()
    }
    seconds = measure.alternate(runs, repeats, warmup=0)
    for name, run in runs.items():
        about = {"case": name, "lengths": kit.packed(workloads[name]), "seconds": seconds[name]}
        group, last = fields | about | run.fields(subject), run.steps[-1]
        group["useful"] = sum(step.prefill_tokens + step.decode_tokens for step in last)
        group["wasted"] = sum(step.wasted_tokens for step in last)
        group["decode"] = [[step.seconds for step in steps[1:]] for steps in run.steps]
        yield group


def scaling(subject: Subject, plan: Any) -> Iterator[Group]:
    """Batches of equal rows."""
    equal = {str(size): [(plan.prompt, plan.answer)] * size for size in plan.batches}
    wide = {str(plan.wide): [(plan.prompt, plan.wide_answer)] * plan.wide}
    yield from alternated(subject, equal, plan.repeats)
    yield from alternated(subject, wide, 1)


def single(subject: Subject, plan: Any) -> Iterator[Group]:
    """Equal prompts: one after the other in stage 02, and as one batch."""
    for size, repeats in plan.single:
        engines = {SINGLE: SingleEngine(subject.model), BATCH: Engine(subject.model)}
        lengths = [(plan.prompt, plan.answer)] * size
        often = {SINGLE: max(1, repeats - 1), BATCH: repeats}
        yield kit.compare(subject, engines, lengths, often)[0]


def waste(subject: Subject, plan: Any) -> Iterator[Group]:
    """One row longer than the others, and the same number of tokens spread evenly over the rows."""
    size, short = plan.waste_rows, plan.short
    for what, longest in (("answer", plan.long_answer), ("prompt", plan.long_prompt)):
        total = short * (size - 1) + longest
        counts = {
            f"equal {what}s": [(total + row) // size for row in range(size)],
            f"one long {what}": [*[short] * (size - 1), longest],
        }
        workloads = {name: [(short, n) for n in lengths] for name, lengths in counts.items()}
        if what == "prompt":
            workloads = {name: [(n, short) for n in lengths] for name, lengths in counts.items()}
        yield from alternated(subject, workloads, 1, pair=f"{what}s")


def step(row: Row) -> Summary:
    """Milliseconds of a decode step: the median of all, and the range of the repeats' medians."""
    medians = [1e3 * median(run) for run in row["decode"]]
    return Summary(1e3 * median(sum(row["decode"], [])), min(medians), max(medians))


def cost(row: Row) -> Cost:
    """The cost of a decode step halfway through a batch of equal rows."""
    ((prompt, answer), *_) = row.lengths
    return forward_cost(row.config, row.kind, 1, prompt + (answer - 2) // 2, rows=row.requests)


def decode(row: Row) -> float:
    """Tokens per second of the decode steps."""
    return row.requests / step(row).median * 1e3


def limit(row: Row) -> float:
    """Most tokens per second of a decode step."""
    return row.requests / row.least([cost(row)])


def predicted(row: Row) -> float:
    """Least seconds, one after the other or as one batch."""
    size = 1 if row.variant == SINGLE else row.requests
    return row.least(static_costs(row.config, row.kind, row.lengths, size))


def against_equal(row: Row) -> tuple[float, float]:
    """Tokens per second over those of equal rows: measured, and predicted."""
    base, _ = row.results.groups("waste", pair=row["pair"], dtype=row["dtype"])
    share = (row.tokens / predicted(row)) / (base.tokens / predicted(base))
    return row.rate.median / base.rate.median, share


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts."""
    few = "a product of few rows reaches neither the bandwidth nor the peak"
    for dtype in results.plan["dtypes"]:
        sizes = {row.requests: row for row in results.groups("scaling", dtype=dtype)}
        single, many = sizes[1], sizes[sorted(sizes)[len(sizes) // 2 - 1]]
        what = f"{many.requests} rows, tok/s over one row, {dtype}"
        yield Claim(what, limit(many) / limit(single), decode(many) / decode(single), "x", few)
    most = max(results.groups("scaling", dtype="float32"), key=lambda row: row.requests)
    what, why = f"decoding {most.requests} rows", "the products reach half of the peak"
    yield Claim(what, limit(most), decode(most), "tok/s", why)
    both = "one row stays below the bandwidth, and a batch further below the peak"
    for row in results.groups("single", dtype="float32"):
        why = both if row.requests > 1 else "the control: the same work"
        what = f"gain of a batch of {row.requests}"
        yield faster(what, row, (SINGLE, BATCH), predicted, why)
    for pair, why in (
        ("answers", "attention over many columns reads at far less than the bandwidth"),
        ("prompts", "nearly all the work is a prefill, which is near its limit"),
    ):
        _, row = results.groups("waste", pair=pair)
        measured, limits = against_equal(row)
        yield Claim(f"{row['case']}, over equal rows", limits, measured, "x", why)


COLUMNS: dict[str, rows.Column] = {
    "batch": "requests",
    "sequences": "requests",
    "decode, tok/s (limit)": lambda row: f"{decode(row):,.1f} ({limit(row):,.0f})",
    "step, ms": lambda row: step(row).show(),
    "bound by": lambda row: cost(row).bound(row.limits, row.kind),
    "MBU": lambda row: f"{cost(row).bytes / step(row).median * 1e3 / row.bandwidth:.0%}",
    "MFU": lambda row: f"{cost(row).flops / step(row).median * 1e3 / row.peak:.0%}",
    "one after the other (stage 02), ms": ms(SINGLE),
    "as a batch, ms": ms(BATCH),
    "gain (predicted)": rows.gain(SINGLE, predicted, BATCH),
    "rows": lambda row: f"{row.requests}, {row['case']}",
    "steps": "passes",
    "tokens computed (wasted)": lambda row: (
        f"{row['useful'] + row['wasted']:,} ({row['wasted'] / (row['useful'] + row['wasted']):.0%})"
    ),
    "over equal rows (predicted)": lambda row: "{:.2f}x ({:.2f}x)".format(*against_equal(row)),
}
TABLES = rows.tables(
    COLUMNS,
    """
    scaling: dtype | batch | decode, tok/s (limit) | step, ms | bound by | MBU | MFU
      | cache, MB | same tokens
    single: dtype | sequences | one after the other (stage 02), ms | as a batch, ms
      | gain (predicted) | same tokens
    waste: rows | steps | tokens computed (wasted) | tok/s | over equal rows (predicted)
      | same tokens
    """,
    profile=rows.operators,
    claims=closing(claims),
)


def scaling_chart(results: Results) -> Figure:
    series: dict[str, list[float]] = {}
    for dtype in results.plan["dtypes"]:
        groups = results.groups("scaling", dtype=dtype)
        series |= {dtype: list(map(decode, groups)), f"limit, {dtype}": list(map(limit, groups))}
    return charts.lines(
        "More rows in a step cost little, until the processor has enough to do",
        "sequences in the batch (GPT-2 124M shape)",
        "decode, tok/s",
        [row.requests for row in groups],
        series,
        dashed=[name for name in series if name.startswith("limit")],
        log_x=True,
        log_y=True,
    )


def headline(results: Results) -> str:
    row = max(results.groups("single", dtype="float32"), key=lambda row: row.requests)
    return (
        f"{row.requests} prompts as one batch: {row.gain(SINGLE, BATCH):.1f}x one after the other "
        "(GPT-2 124M shape, float32)"
    )


WORK = kit.cases(
    Case(scaling),
    Case(single),
    Case(waste, dtypes=1),
    Case(kit.profile({"In {dtype}": Engine}, warmup=0)),
)
CHARTS = {"scaling": scaling_chart}
BENCHMARK = kit.Benchmark("stage03_batching", __doc__, FULL, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
