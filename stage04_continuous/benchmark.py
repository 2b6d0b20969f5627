"""What a decision before every pass buys, where it buys nothing, and what it costs:
`python -m stage04_continuous.benchmark`.

A throughput says little alone, so slot occupancy is shown beside it: of all places that the passes
had (slots times passes), the share that computed for a request which was still there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.forecast import pass_cost, simulate, static_costs
from shared.bench.kit import Case, Group, Lengths, Subject
from shared.bench.rows import Results, Row, is_peer, median, percentile
from shared.measure import summarize
from shared.peers import PAGE, TransformersContinuous
from shared.roofline import Cost
from stage01_forward.generation import Output
from stage02_kv_cache.engine import Engine as SingleEngine
from stage03_batching.engine import Engine as StaticEngine

from . import timeline
from .cache import SlotCache
from .engine import Engine
from .request import Request
from .runner import Runner
from .scheduler import Scheduler

SINGLE, STATIC, OURS = "stage 02, one request", "stage 03, static", "stage 04, continuous"
WHOLE = "whole"  # a prompt that is not cut into chunks


@dataclass(frozen=True)
class Sizes(kit.Plan):
    """A budget is that of a pass, in tokens."""

    # Win: answers of very different lengths, all there at the start; half are below `middle`.
    requests: int = 72
    slots: int = 24
    budget: int = 256
    prompts: tuple[int, int] = (16, 64)
    answers: tuple[int, int] = (8, 256)
    middle: int = 48
    repeats: tuple[int, int] = (2, 1)  # of this stage, of the others
    # Null and peers: as many equal requests as slots. The first pass takes all prompts.
    equal_slots: tuple[int, ...] = (8, 32)
    equal: tuple[int, int] = (16, 32)
    equal_repeats: tuple[int, int] = (2, 1)  # of this stage, of the others
    # Lose: one request.
    single: tuple[int, int] = (64, 64)
    single_repeats: int = 2
    # A long prompt arrives among neighbours in the middle of their answers.
    neighbours: int = 8
    neighbours_prompt: int = 64
    before: int = 24  # tokens of each neighbour before the long prompt arrives
    after: int = 64
    long_prompt: int = 900
    long_answer: int = 8
    chunks: tuple[int, ...] = (64, 128, 256)
    chunk_repeats: int = 2
    gantt: tuple[int, int] = (16, 200)  # slots and steps of the winning run that are drawn


FULL = Sizes()
QUICK = kit.quick(FULL)


def workload(plan: Sizes) -> Lengths:
    """The requests of the winning case."""
    return kit.lognormal(plan.requests, plan.prompts, plan.answers, plan.middle)


def runner(subject: Subject, slots: int, slot_tokens: int) -> Runner:
    return Runner(subject.model, SlotCache(subject.config, slots, slot_tokens, subject.dtype))


def side_by_side(
    subject: Subject,
    kinds: Iterable[str],
    lengths: Lengths,
    slots: int,
    budget: int,
    repeats: tuple[int, int],
) -> tuple[Group, Any]:
    """One workload on stage 03, this stage and transformers with the attentions `kinds`, all with
    the same slots."""
    most = max(prompt + answer for prompt, answer in lengths)
    engines: dict[str, Any] = {
        STATIC: StaticEngine(subject.model, max_batch=slots),
        OURS: Engine(runner(subject, slots, most), Scheduler(slots, budget)),
    }
    with ExitStack() as stack:
        for kind in kinds:
            peer = TransformersContinuous(subject.peer(kind), slots, most, budget)
            passes = partial(getattr, peer, "passes")
            engines[f"transformers, {kind}"] = kit.Peer(stack.enter_context(peer).generate, passes)
        often = {name: repeats[name != OURS] for name in engines}
        about: dict[str, Any] = {"slots": slots, "slot_tokens": most, "budget": budget}
        return kit.compare(subject, engines, lengths, often, like=OURS, **about)


def equal(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Equal requests, one for each slot; and the bookkeeping of every pass that decodes them
    all."""
    for slots in plan.equal_slots:
        lengths, budget = [plan.equal] * slots, slots * plan.equal[0]
        kinds, repeats = ("sdpa", "eager"), plan.equal_repeats
        group, runs = side_by_side(subject, kinds, lengths, slots, budget, repeats)
        decode = [
            [step for step in steps if step.decode_tokens == slots] for steps in runs[OURS].steps
        ]
        yield group | {
            "step": [[step.seconds for step in steps] for steps in decode],
            "bookkeeping": [[step.bookkeeping_seconds for step in steps] for steps in decode],
        }


def win(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Answers of very different lengths; and what the slots did, for the charts."""
    kinds, (slots, steps) = ("sdpa",), plan.gantt
    group, runs = side_by_side(
        subject, kinds, workload(plan), plan.slots, plan.budget, plan.repeats
    )
    bars = timeline.bars(runs[OURS].steps[-1][:steps])
    drawn = [list(asdict(bar).values()) for bar in bars if bar.slot < slots]
    yield group | {"gantt": {"slots": slots, "steps": steps, "bars": drawn}}


def single(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A single request on the engines of three stages, with the slots of the winning case."""
    scheduler, slots = Scheduler(plan.slots, plan.budget), plan.slots
    most = min(plan.prompts[1] + plan.answers[1], subject.config.n_positions)
    engines = {
        SINGLE: SingleEngine(subject.model),
        STATIC: StaticEngine(subject.model, max_batch=slots),
        OURS: Engine(runner(subject, slots, most), scheduler),
    }
    about: dict[str, Any] = {"slots": plan.slots, "budget": plan.budget}
    yield kit.compare(subject, engines, [plan.single], plan.single_repeats, "single", **about)[0]


class Arrival:
    """A long prompt arrives while its neighbours decode: what it does to them, at every call.

    The neighbours get a token each in every pass, so one list of gaps between their tokens holds
    for all of them.
    """

    def __init__(self, subject: Subject, plan: Sizes, engine: Engine) -> None:
        self.plan, self.engine = plan, engine
        self.prompts = subject.prompts([plan.neighbours_prompt] * plan.neighbours, "neighbour")
        (self.long_prompt,) = subject.prompts([plan.long_prompt], "long")
        self.before: list[list[float]] = []  # a run -> gaps before the long prompt arrives
        self.after: list[list[float]] = []
        self.first: list[float] = []  # a run -> seconds from its arrival to its first token
        self.outputs: list[Output] = []

    def __call__(self) -> None:
        sampling = kit.greedy(1 + self.plan.before + self.plan.after)
        neighbours = [self.engine.add(Request(prompt, sampling)) for prompt in self.prompts]
        while not all(request.output.token_ids for request in neighbours):
            self.engine.step()
        self.before.append(self._gaps(self.plan.before))
        newcomer = self.engine.add(Request(self.long_prompt, kit.greedy(self.plan.long_answer)))
        self.after.append(self._gaps(self.plan.after, newcomer))
        if any(request.output.finish_reason is None for request in neighbours):
            raise AssertionError("a neighbour went without a token in some pass")
        for _ in self.engine.run():
            pass
        self.outputs = [request.output for request in [*neighbours, newcomer]]

    def _gaps(self, count: int, newcomer: Request | None = None) -> list[float]:
        """Seconds of each of `count` steps."""
        times = [time.perf_counter()]
        for _ in range(count):
            silent = newcomer is not None and not newcomer.output.token_ids
            self.engine.step()
            times.append(time.perf_counter())
            if silent and newcomer is not None and newcomer.output.token_ids:
                self.first.append(times[-1] - times[0])
        return np.diff(times).tolist()


def chunk_scheduler(plan: Mapping[str, Any], chunk: str) -> Scheduler:
    """Runs the long prompt in chunks of so many tokens, or whole; the budget has room for it
    all."""
    slots, budget = plan["neighbours"] + 1, plan["neighbours"] + plan["long_prompt"]
    if chunk == WHOLE:
        return Scheduler(slots, budget, chunked=False)
    return Scheduler(slots, budget, max_chunk=int(chunk))


def chunking(subject: Subject, plan: Sizes) -> Iterator[Group]:
    names = [*map(str, plan.chunks), WHOLE]
    own = plan.neighbours_prompt + 1 + plan.before + plan.after
    most = max(plan.long_prompt + plan.long_answer, own)
    shared = runner(subject, plan.neighbours + 1, most)
    engines = {name: Engine(shared, chunk_scheduler(asdict(plan), name)) for name in names}
    runs = {name: Arrival(subject, plan, engine) for name, engine in engines.items()}
    measure.alternate(runs, plan.chunk_repeats)
    often = plan.chunk_repeats  # the runs before them warmed up
    yield {
        **subject.about,
        **{key: getattr(plan, key) for key in ("neighbours", "neighbours_prompt")},
        **{key: getattr(plan, key) for key in ("long_prompt", "long_answer")},
        "before": {name: run.before[-often:] for name, run in runs.items()},
        "after": {name: run.after[-often:] for name, run in runs.items()},
        "seconds": {name: run.first[-often:] for name, run in runs.items()},
        "proof": [subject.prove(run.outputs) for run in runs.values()][-1],
    }


# ---- predictions --------------------------------------------------------------------------------


def costs(row: Row) -> list[Cost]:
    """Of the passes that the engine of a row must make."""
    if row.variant == OURS:
        passes = simulate(Scheduler(row["slots"], row["budget"]), row.lengths).passes
        return [pass_cost(row.config, row.kind, parts) for parts in passes]
    size = 1 if row.variant == SINGLE else row["slots"]
    return static_costs(row.config, row.kind, row.lengths, size)


def least(row: Row) -> float:
    return row.least(costs(row))


def arrival(row: Row) -> tuple[float, float]:
    """Least seconds of the longest pass that the long prompt causes, and to its first token."""
    count, before = row["neighbours"], len(row["before"][0])
    crowd = [(0, row["neighbours_prompt"], 1 + before + len(row["after"][0]))] * count
    newcomer = (1 + before, row["long_prompt"], row["long_answer"])
    watch = simulate(chunk_scheduler(row.group, row.variant), [*crowd, newcomer])
    seconds = []
    for parts in watch.passes:
        own = [part for part in parts if part.request == count]
        if own:
            seconds.append(row.least([pass_cost(row.config, row.kind, parts)]))
            if own[0].samples:
                break
    return max(seconds), sum(seconds)


# ---- tables and charts --------------------------------------------------------------------------


def occupancy(row: Row) -> float:
    return 1.0 if row.variant == SINGLE else row["busy"] / (row["slots"] * row["passes"])


def cache(row: Row) -> str:
    pages = math.ceil(row.get("slot_tokens", 0) / PAGE) * PAGE * row["slots"]
    held = pages * row.config.kv_bytes_per_token(row.kind) if is_peer(row.variant) else row["bytes"]
    return f"{held / 1e6:,.0f}"


def gaps(row: Row) -> dict[str, list[float]]:
    """Seconds between a neighbour's tokens in all runs: without a long prompt, and by its
    chunks."""
    calm = [gap for runs in row.group["before"].values() for gaps in runs for gap in gaps]
    found = {"no long prompt": calm}
    for own in row.variants:
        found[chunk_name(own)] = [gap for gaps in own["after"] for gap in gaps]
    return found


def chunk_name(row: Row) -> str:
    return WHOLE if row.variant == WHOLE else f"chunks of {row.variant}"


def chunk_rows(results: Results) -> Iterator[dict[str, str]]:
    for row in results.groups("chunking"):
        own = {chunk_name(variant): variant for variant in row.variants}
        for name, some in gaps(row).items():
            spread = [percentile(some, 0.5), percentile(some, 0.99), max(some)]
            longest = first = ""
            if variant := own.get(name):
                most, limit = arrival(variant)
                longest = f" ({most * 1e3:,.1f})"
                first = f"{rows.milliseconds(variant['seconds'], 0)}, {limit * 1e3:,.0f}"
            p50, p99, top = (f"{value * 1e3:,.1f}" for value in spread)
            yield {
                "dtype": row["dtype"],
                "long prompt": name,
                "ITL p50, ms": p50,
                "p99, ms": p99,
                "max, ms (limit)": top + longest,
                "its first token, limit, ms": first,
                "tokens proved": row.proof if variant else "",
            }


def share_of_step(row: Row) -> str:
    runs = [np.divide(own, step) for own, step in zip(row["bookkeeping"], row["step"], strict=True)]
    own = [median(run) for run in runs]
    return f"{median(np.concatenate(runs)):.1%} ({min(own):.1%} to {max(own):.1%})"


def flat_ms(key: str, digits: int) -> rows.Column:
    return lambda row: f"{median(s for run in row[key] for s in run) * 1e3:.{digits}f}"


def passes(row: Row) -> str:
    done = f"{row['passes']:,}"
    return done if is_peer(row.variant) else f"{done} ({len(costs(row)):,})"


def seconds(row: Row) -> str:
    taken = summarize(row["seconds"]).show(2)
    return taken if is_peer(row.variant) else f"{taken}, {least(row):.2f}"


COLUMNS: dict[str, rows.Column] = {
    "slots in use": lambda row: f"{occupancy(row):.0%}",
    "passes": passes,
    "passes (predicted)": passes,
    "seconds, limit": seconds,
    "limit, tok/s": lambda row: f"{row.tokens / least(row):,.1f}",
    "cache, MB": cache,
    "over stage 03 (predicted)": rows.gain(STATIC, least),
    "over stage 02 (predicted)": rows.gain(SINGLE, least),
    "stage 04 over it": lambda row: f"{row.median / row.of(OURS).median:.2f}x",
    "same tokens": lambda row: row.alike(OURS, "stage 04") if "same" in row.group else row.proof,
    "step p50, ms": flat_ms("step", 1),
    "scheduler, sampling, postprocessing p50, ms": flat_ms("bookkeeping", 2),
    "share p50": share_of_step,
    "passes with all rows": lambda row: sum(map(len, row["step"])),
}


def without(case: str, *names: str) -> Callable[[Results], list[Row]]:
    """All rows of a case but those of some engines."""
    hidden = lambda row: any(row.variant.startswith(name) for name in names)  # noqa: E731
    return lambda results: [row for row in results.rows(case) if not hidden(row)]


TABLES = rows.tables(
    COLUMNS,
    """
    win: engine | tok/s | slots in use | passes (predicted) | over stage 03 (predicted)
      | same tokens
    win_seconds < win: dtype | engine | seconds, limit | cache, MB | stage 04 over it
    null: dtype | slots | engine | tok/s | seconds, limit | slots in use | passes (predicted)
      | over stage 03 (predicted)
    peers: dtype | slots | engine | tok/s | slots in use | passes | stage 04 over it | same tokens
    lose < single: dtype | engine | tok/s | limit, tok/s | slots in use | cache, MB
      | over stage 02 (predicted) | same tokens
    overhead: dtype | slots | passes with all rows | step p50, ms
      | scheduler, sampling, postprocessing p50, ms | share p50
    """,
    null=without("equal", "transformers"),
    peers=without("equal", STATIC),
    chunking=chunk_rows,
    overhead=lambda results: results.groups("equal"),
)


def gantt_chart(results: Results) -> Figure:
    drawn = results["win"][0]["gantt"]
    bars = [timeline.Bar(*bar) for bar in drawn["bars"]]
    title = "Slots are handed on while their neighbours decode"
    return timeline.draw(bars, drawn["steps"], title, drawn["slots"])


def occupancy_chart(results: Results) -> Figure:
    """All places of all passes; those in use are dark."""
    (group,) = results.groups("win")
    slots = group["slots"]
    gap = slots * 0.45
    title = "Places that compute for a request, and places that do not"
    figure, axes = charts.new_figure(title, "forward pass", "rows in use")
    with matplotlib.rc_context(charts.style()):
        ticks: dict[float, str] = {}
        for number, row in enumerate((group.of(OURS), group.of(STATIC))):
            floor, count = number * (slots + gap), row["passes"]
            values = [floor + used for used, _ in row["rows"]]
            edges = [0, *accumulate(times for _, times in row["rows"])]
            axes.fill_between([0, count], floor, floor + slots, facecolor=charts.FAINT, linewidth=0)
            look = {"step": "post", "facecolor": charts.COLOURS[number], "linewidth": 0}
            axes.fill_between(edges, floor, [*values, values[-1]], **look)
            words = f"{row.variant}: {count:,} passes, {occupancy(row):.0%} of the places in use"
            axes.annotate(words, (0, floor + slots), (0, 4), textcoords="offset points", fontsize=9)
            ticks |= {floor: "0", floor + slots: str(slots)}
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.set_xlim(left=0)
        axes.set_ylim(0, 2 * (slots + gap))
        axes.grid(False, axis="y")
    return figure


def chunking_chart(results: Results) -> Figure:
    row = results.groups("chunking")[0]
    found = {name: [gap * 1e3 for gap in some] for name, some in gaps(row).items()}
    shown = {"p50": lambda some: percentile(some, 0.5), "p99": lambda some: percentile(some, 0.99)}
    series = {
        name: [of(some) for some in found.values()] for name, of in (shown | {"max": max}).items()
    }
    title = "In chunks, a long prompt holds its neighbours up less"
    where = f"prompt of {row['long_prompt']} (GPT-2 124M shape, {row['dtype']})"
    return charts.bars(title, f"milliseconds between tokens, {where}", list(found), series)


def headline(results: Results) -> str:
    group = results.groups("win")[0]
    ours, static = group.of(OURS), group.of(STATIC)
    return (
        f"{static.median / ours.median:.1f}x static batching where answers differ in length: "
        f"{occupancy(ours):.0%} of the slots in use instead of {occupancy(static):.0%} "
        f"(GPT-2 124M shape, {group['dtype']})"
    )


ABOUT = "Measures continuous batches on this CPU, beside static ones and those of transformers."
WORK = kit.cases(Case(equal), Case(win, dtypes=1), Case(single), Case(chunking))
CHARTS = {"gantt": gantt_chart, "occupancy": occupancy_chart, "chunking": chunking_chart}
BENCHMARK = kit.Benchmark("stage04_continuous", ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
