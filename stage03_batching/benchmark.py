"""What a batch buys, where it buys nothing, and what its padding costs:
`python -m stage03_batching.benchmark`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Case, Group, Lengths, Runs, Subject
from shared.bench.rows import Results, Row, median, ms
from shared.measure import Summary
from shared.roofline import static_costs
from stage02_kv_cache.engine import Engine as SingleEngine

from .engine import Engine

SINGLE, BATCH = "single", "batch"


@dataclass(frozen=True)
class Sizes(kit.Plan):
    prompt: int = 64
    answer: int = 32
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    # Once, and with few tokens: its prompts alone take 10 seconds, and their proof as long.
    wide: int = 128
    wide_answer: int = 8
    repeats: int = 2
    peers: tuple[tuple[int, int], ...] = ((8, 2), (32, 1))  # sequences, repeats
    single: tuple[tuple[int, int], ...] = ((1, 3), (32, 2))  # the null control, and the win
    waste_rows: int = 32  # all short but one
    short: int = 16
    long_answer: int = 256
    long_prompt: int = 512
    profiled: tuple[int, int, int] = (32, 8, 64)  # sequences, prompt, answer: nearly all decode


FULL = Sizes()
QUICK = kit.quick(FULL)


def alternated(
    subject: Subject, workloads: Mapping[str, Lengths], repeats: int, **fields: Any
) -> Iterator[Group]:
    """Several workloads of this engine in turn, each as one batch, with the seconds of every
    pass."""
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


def scaling(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Batches of equal rows."""
    equal = {str(size): [(plan.prompt, plan.answer)] * size for size in plan.batches}
    yield from alternated(subject, equal, plan.repeats)
    wide = {str(plan.wide): [(plan.prompt, plan.wide_answer)] * plan.wide}
    yield from alternated(subject, wide, 1)


def single(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """One after the other by stage 02, and as one batch."""
    for size, repeats in plan.single:
        engines = {SINGLE: SingleEngine(subject.model), BATCH: Engine(subject.model)}
        lengths = [(plan.prompt, plan.answer)] * size
        often = {SINGLE: max(1, repeats - 1), BATCH: repeats}
        yield kit.compare(subject, engines, lengths, often)[0]


def peers(subject: Subject, plan: Sizes) -> Iterator[Group]:
    for size, repeats in plan.peers:
        lengths = [(plan.prompt, plan.answer)] * size
        yield kit.beside_peers(subject, Engine(subject.model), lengths, repeats)


def waste(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """One row unlike the others, and the same number of tokens spread evenly over the rows."""
    size, short = plan.waste_rows, plan.short
    for what, longest in (("answer", plan.long_answer), ("prompt", plan.long_prompt)):
        total = short * (size - 1) + longest
        counts = {
            f"equal {what}s": [(total + row) // size for row in range(size)],
            f"one long {what}": [*[short] * (size - 1), longest],
        }
        workloads = {
            name: [(short, n) if what == "answer" else (n, short) for n in own]
            for name, own in counts.items()
        }
        yield from alternated(subject, workloads, 1, pair=f"{what}s")


def profile(subject: Subject, plan: Sizes) -> list[Group]:
    size, prompt, answer = plan.profiled
    prompts = subject.prompts([prompt] * size, "profile")
    decode = partial(Engine(subject.model).generate, prompts, kit.greedy(answer))
    return [kit.profiled(subject, f"In {subject.about['dtype']}", decode, warmup=0)]


def step(row: Row) -> Summary:
    """Seconds of a decode step: the median of all, and the range of the repeats' own medians."""
    own = [median(run) for run in row["decode"]]
    return Summary(median(s for run in row["decode"] for s in run), min(own), max(own))


def limit(row: Row) -> float:
    """Seconds of a decode step, at least."""
    return row.costs[1].seconds(row.results.limits, row.kind)


def predicted(row: Row) -> float:
    """Least seconds, one after the other or as one batch."""
    size = 1 if row.variant == SINGLE else row.requests
    return row.least(static_costs(row.config, row.kind, row.lengths, size))


def against_equal(row: Row) -> tuple[float, float]:
    """Tokens per second over those of equal rows, and what was predicted of it."""
    base, _ = row.results.groups("waste", pair=row["pair"], dtype=row["dtype"])
    share = (row.tokens / predicted(row)) / (base.tokens / predicted(base))
    return row.rate.median / base.rate.median, share


def wasted(row: Row) -> str:
    tokens = row["useful"] + row["wasted"]
    return f"{tokens:,} ({row['wasted'] / tokens:.0%})"


def held(row: Row) -> float:
    """Bytes of the cache by the formula."""
    ((prompt, answer), *_) = row.lengths
    return row.requests * (prompt + answer - 1) * row.config.kv_bytes_per_token(row.kind)


def a_second(seconds: Callable[[Row], float]) -> Callable[[Row], float]:
    """Tokens per second, of steps that take this long."""
    return lambda row: row.requests / seconds(row)


RATE, LIMIT = a_second(lambda row: step(row).median), a_second(limit)


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts."""
    few = "a product of few rows reaches neither the bandwidth nor the peak"
    for dtype in results.plan["dtypes"]:
        sizes = {row.requests: row for row in results.groups("scaling", dtype=dtype)}
        one, some = sizes[1], sizes[sorted(sizes)[len(sizes) // 2 - 1]]
        quotient = some.requests * step(one).median / step(some).median
        what = f"{some.requests} rows, tok/s over one row, {dtype}"
        yield Claim(what, some.requests * limit(one) / limit(some), quotient, "x", few)
    most = max(results.groups("scaling", dtype="float32"), key=lambda row: row.requests)
    what, why = f"decoding {most.requests} rows", "the products reach half of the peak"
    yield Claim(what, most.requests / limit(most), most.requests / step(most).median, "tok/s", why)
    both = "one row reaches about half of the bandwidth, and a batch less than half of the peak"
    for row in results.groups("single", dtype="float32"):
        what = f"gain of a batch of {row.requests}"
        limits = predicted(row.of(SINGLE)) / predicted(row.of(BATCH))
        why = both if row.requests > 1 else "the control: the same work"
        yield Claim(what, limits, row.of(SINGLE).median / row.of(BATCH).median, "x", why)
    for row in results.groups("waste"):
        if row["case"].startswith("one long"):
            measured, limits = against_equal(row)
            why = "nearly all the work is a prefill, which is near its limit"
            if row["pair"] == "answers":
                why = "attention over many columns reads at far less than the bandwidth"
            yield Claim(f"{row['case']}, over equal rows", limits, measured, "x", why)


COLUMNS: dict[str, rows.Column] = {
    "batch": "requests",
    "sequences": "requests",
    "decode, tok/s (limit)": lambda row: f"{RATE(row):,.1f} ({LIMIT(row):,.0f})",
    "step, ms": lambda row: Summary(*(value * 1e3 for value in vars(step(row)).values())).show(),
    "bound by": lambda row: row.costs[1].bound(row.results.limits, row.kind),
    "MBU": lambda row: f"{row.costs[1].bytes / step(row).median / row.bandwidth:.0%}",
    "MFU": lambda row: f"{row.costs[1].flops / step(row).median / row.peak:.0%}",
    "cache, MB (formula)": lambda row: f"{row['bytes'] / 1e6:,.1f} ({held(row) / 1e6:,.1f})",
    "one after the other (stage 02), ms": ms(SINGLE),
    "as a batch, ms": ms(BATCH),
    "gain (predicted)": rows.gain(SINGLE, predicted, BATCH),
    "same tokens": lambda row: row.of(BATCH).proof,
    "rows": lambda row: f"{row.requests}, {row['case']}",
    "steps": "passes",
    "tokens computed (wasted)": wasted,
    "over equal rows (predicted)": lambda row: "{:.2f}x ({:.2f}x)".format(*against_equal(row)),
    "same tokens as ours": lambda row: row.alike("ours", "ours"),
}
TABLES = rows.tables(
    COLUMNS,
    f"""
    scaling: dtype | batch | decode, tok/s (limit) | step, ms | bound by | MBU | MFU
      | cache, MB (formula) | same tokens
    prefill < peers: dtype | batch | {rows.PREFILL}
    decode < peers: dtype | batch | {rows.DECODE} | same tokens as ours
    single: dtype | sequences | one after the other (stage 02), ms | as a batch, ms
      | gain (predicted) | same tokens
    waste: rows | steps | tokens computed (wasted) | tok/s | over equal rows (predicted)
      | same tokens
    """,
    profile=rows.operators,
    claims=closing(claims),
)


def roofline_chart(results: Results) -> Figure:
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in results.groups("scaling"):
        cost = row.costs[1]
        point = (cost.intensity, cost.flops / step(row).median / 1e9, str(row.requests))
        points.setdefault(row["dtype"], []).append(point)
    title = "Batches climb the memory's slope, until arithmetic is the limit"
    note, found = "GPT-2 124M shape; the numbers are batches", results.limits
    return charts.roofline(title, note, found.bandwidth_gb_s, found.gflops, points)


CHARTS = {
    "roofline": roofline_chart,
    "scaling": rows.lines(
        "More rows in a step cost little, until the processor has enough to do",
        ("sequences in the batch (GPT-2 124M shape)", "decode, tok/s"),
        "scaling",
        lambda row: row.requests,
        {"{dtype}": RATE, "limit, {dtype}": LIMIT},
        dashed=["limit, {dtype}"],
        log_x=True,
        log_y=True,
    ),
}


def headline(results: Results) -> str:
    row = max(results.groups("single", dtype="float32"), key=lambda row: row.requests)
    gain = row.of(SINGLE).median / row.of(BATCH).median
    return (
        f"{row.requests} prompts as one batch: {gain:.1f}x one after the other "
        "(GPT-2 124M shape, float32)"
    )


ABOUT = "Measures batches of many sizes on this CPU, beside the stage before and transformers."
WORK = kit.cases(Case(scaling), Case(peers), Case(single), Case(waste, dtypes=1), Case(profile))
BENCHMARK = kit.Benchmark("stage03_batching", ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
