"""What a batch buys, where it buys nothing, and what its padding costs:
`python -m stage03_batching.benchmark`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
from matplotlib.figure import Figure
from tqdm import tqdm

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.forecast import static_costs
from shared.bench.kit import Case, Group, Lengths, Runs, Subject
from shared.bench.rows import Results, Row, median, ms
from shared.measure import Summary
from stage02_kv_cache.engine import Engine as SingleEngine

from .engine import Engine

SINGLE, BATCH = "single", "batch"


@dataclass(frozen=True)
class Sizes(kit.Plan):
    prompt: int = 64
    answer: int = 32
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    # Once, and with few tokens: its prompts alone take 10 seconds, and their proof as long; 0: no.
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
FEW: Any = {"batches": (1, 8, 64), "wide": 0, "answer": 8, "peers": ((8, 1),)}
SHORT: Any = {"waste_rows": 8, "long_answer": 64, "long_prompt": 128, "profiled": (32, 8, 16)}
QUICK = kit.quick(FULL, wide=0)


def alternated(
    subject: Subject, workloads: Mapping[str, Lengths], repeats: int, **fields: Any
) -> list[Group]:
    """Several workloads of this engine in turn, each as one batch, with the seconds of every
    pass."""
    engine = Engine(subject.model, max_batch=max(map(len, workloads.values())))
    runs = {
        name: Runs(engine, subject.prompts(prompt for prompt, _ in pairs), [n for _, n in pairs])
        for name, pairs in workloads.items()
    }
    seconds = measure.alternate(runs, repeats, warmup=0)
    return [
        {
            **subject.about,
            **fields,
            "case": name,
            "lengths": kit.packed(workloads[name]),
            "bytes": run.bytes,
            "seconds": seconds[name],
            "passes": len(run.steps[-1]),
            "useful": sum(step.prefill_tokens + step.decode_tokens for step in run.steps[-1]),
            "wasted": sum(step.wasted_tokens for step in run.steps[-1]),
            "decode": [[step.seconds for step in steps[1:]] for steps in run.steps],
            "proof": [subject.prove(outputs) for outputs in run.outputs][-1],
        }
        for name, run in runs.items()
    ]


def fits(subject: Subject, size: int, prompt: int, answer: int) -> bool:
    """Whether a batch leaves half of the free memory free: its cache, prefill and logits."""
    config, itemsize = subject.config, subject.dtype.itemsize
    cache = size * (prompt + answer - 1) * config.kv_bytes_per_token(subject.dtype)
    numbers = size * (prompt * 12 * config.n_embd + 2 * config.vocab_size)
    return cache + numbers * itemsize < psutil.virtual_memory().available / 2


def scaling(subject: Subject, plan: Sizes) -> list[Group]:
    """Batches of equal rows."""
    equal = {str(size): [(plan.prompt, plan.answer)] * size for size in plan.batches}
    groups = alternated(subject, equal, plan.repeats)
    if plan.wide and fits(subject, plan.wide, plan.prompt, plan.wide_answer):
        wide = {str(plan.wide): [(plan.prompt, plan.wide_answer)] * plan.wide}
        groups += alternated(subject, wide, 1)
    elif plan.wide:
        tqdm.write(f"note: {plan.wide} sequences are left out: too little memory is free")
    return groups


def single(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """One after the other by stage 02, and as one batch."""
    for size, repeats in plan.single:
        engines = {SINGLE: SingleEngine(subject.model), BATCH: Engine(subject.model)}
        lengths = [(plan.prompt, plan.answer)] * size
        often = {SINGLE: max(1, repeats - 1), BATCH: repeats}
        yield kit.compare(subject, engines, lengths, often, batch=size)[0]


def peers(subject: Subject, plan: Sizes) -> Iterator[Group]:
    for size, repeats in plan.peers:
        lengths = [(plan.prompt, plan.answer)] * size
        yield kit.beside_peers(subject, Engine(subject.model), lengths, repeats)


def unlike(plan: Sizes) -> dict[str, dict[str, Lengths]]:
    """One row unlike the others, and the same number of tokens spread evenly over the rows."""
    size, short = plan.waste_rows, plan.short

    def spread(longest: int) -> list[int]:
        return [(short * (size - 1) + longest + row) // size for row in range(size)]

    others = [(short, short)] * (size - 1)
    return {
        "answers": {
            "equal answers": [(short, answer) for answer in spread(plan.long_answer)],
            "one long answer": [*others, (short, plan.long_answer)],
        },
        "prompts": {
            "equal prompts": [(prompt, short) for prompt in spread(plan.long_prompt)],
            "one long prompt": [*others, (plan.long_prompt, short)],
        },
    }


def waste(subject: Subject, plan: Sizes) -> Iterator[Group]:
    for pair, workloads in unlike(plan).items():
        yield from alternated(subject, workloads, 1, pair=pair)


def profile(subject: Subject, plan: Sizes) -> list[Group]:
    size, prompt, answer = plan.profiled
    prompts = subject.prompts([prompt] * size, "profile")
    decode = partial(Engine(subject.model).generate, prompts, kit.greedy(answer))
    return [kit.profiled(subject, f"In {subject.about['dtype']}", decode, warmup=0)]


# ---- tables and charts --------------------------------------------------------------------------


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


def against_equal(row: Row) -> str:
    """Tokens per second over those of equal rows, and what was predicted of it."""
    pairs = row.results.groups("waste", pair=row["pair"], dtype=row["dtype"])
    if row["case"] == pairs[0]["case"]:
        return ""
    base = pairs[0]
    share = (row.tokens / predicted(row)) / (base.tokens / predicted(base))
    return f"{row.rate.median / base.rate.median:.2f}x ({share:.2f}x)"


def wasted(row: Row) -> str:
    tokens = row["useful"] + row["wasted"]
    return f"{tokens:,} ({row['wasted'] / tokens:.0%})"


def held(row: Row) -> float:
    """Bytes of the cache by the formula."""
    ((prompt, answer), *_) = row.lengths
    return row.requests * (prompt + answer - 1) * row.config.kv_bytes_per_token(row.kind)


def of_limit(work: str) -> Callable[[Row], str]:
    def share(row: Row) -> str:
        most = row.bandwidth if work == "bytes" else row.peak
        return f"{getattr(row.costs[1], work) / step(row).median / most:.0%}"

    return share


COLUMNS: dict[str, rows.Column] = {
    "batch": "requests",
    "sequences": "requests",
    "decode, tok/s (limit)": lambda row: (
        f"{row.requests / step(row).median:,.1f} ({row.requests / limit(row):,.0f})"
    ),
    "step, ms": lambda row: Summary(*(value * 1e3 for value in vars(step(row)).values())).show(),
    "bound by": lambda row: row.costs[1].bound(row.results.limits, row.kind),
    "MBU": of_limit("bytes"),
    "MFU": of_limit("flops"),
    "cache, MB (formula)": lambda row: f"{row['bytes'] / 1e6:,.1f} ({held(row) / 1e6:,.1f})",
    "one after the other (stage 02), ms": ms(SINGLE),
    "as a batch, ms": ms(BATCH),
    "gain (predicted)": rows.gain(SINGLE, predicted, BATCH),
    "same tokens": lambda row: row.of(BATCH).proof,
    "rows": lambda row: f"{row.requests}, {row['case']}",
    "steps": "passes",
    "tokens computed (wasted)": wasted,
    "over equal rows (predicted)": against_equal,
    "same tokens as ours": lambda row: row.alike("ours", "ours"),
}
SINGLES = (
    "dtype | sequences | one after the other (stage 02), ms | as a batch, ms | gain (predicted) "
    "| same tokens"
)
DRAW = rows.tables(
    COLUMNS,
    f"""
    scaling: dtype | batch | decode, tok/s (limit) | step, ms | bound by | MBU | MFU
      | cache, MB (formula) | same tokens
    prefill < peers: dtype | batch | {rows.PREFILL}
    decode < peers: dtype | batch | {rows.DECODE} | same tokens as ours
    win: {SINGLES}
    null: {SINGLES}
    waste: rows | steps | tokens computed (wasted) | tok/s | over equal rows (predicted)
      | same tokens
    """,
    win=lambda results: [row for row in results.groups("single") if row.requests > 1],
    null=lambda results: [row for row in results.groups("single") if row.requests == 1],
    profile=rows.operators,
)


def scaling_chart(results: Results) -> Figure:
    found = results.groups("scaling")
    sizes = sorted({row.requests for row in found})
    series: dict[str, list[float]] = {}
    for dtype in dict.fromkeys(row["dtype"] for row in found):
        own = {row.requests: row for row in found if row["dtype"] == dtype}
        for name, seconds in ((dtype, lambda row: step(row).median), (f"limit, {dtype}", limit)):
            series[name] = [n / seconds(own[n]) if n in own else math.nan for n in sizes]
    return charts.lines(
        "More rows in a step cost little, until the processor has enough to do",
        "sequences in the batch (GPT-2 124M shape)",
        "decode, tok/s",
        sizes,
        series,
        dashed=[name for name in series if name.startswith("limit")],
        log_x=True,
        log_y=True,
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


def waste_chart(results: Results) -> Figure:
    found = results.groups("waste")
    title = "One longer row, and most of the work is wasted"
    x = f"tokens that went through the model, {found[0].requests} rows"
    series = {name: [row[name] for row in found] for name in ("useful", "wasted")}
    return charts.bars(title, x, [row["case"] for row in found], series, digits=0)


def headline(results: Results) -> str:
    row = max(results.groups("single", dtype="float32"), key=lambda row: row.requests)
    gain = row.of(SINGLE).median / row.of(BATCH).median
    return (
        f"{row.requests} prompts as one batch: {gain:.1f}x one after the other "
        "(GPT-2 124M shape, float32)"
    )


ABOUT = "Measures batches of many sizes on this CPU, beside the stage before and transformers."
WORK = kit.cases(Case(scaling), Case(peers), Case(single), Case(waste, dtypes=1), Case(profile))
CHARTS = {"roofline": roofline_chart, "scaling": scaling_chart, "waste": waste_chart}
BENCHMARK = kit.Benchmark("stage03_batching", ABOUT, FULL, QUICK, WORK, DRAW, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
