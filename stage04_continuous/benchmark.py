"""What a decision before every step buys, where it buys nothing, and what it costs:
`python -m stage04_continuous.benchmark`.

A throughput says little alone, so slot occupancy is shown beside it: of all places that the steps
had (slots times steps), the share that computed for a request which was still there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.forecast import CONTINUOUS as OURS
from shared.bench.forecast import SINGLE, STATIC, costs, least, pass_cost, simulate
from shared.bench.kit import Case, Group, Lengths, Subject
from shared.bench.rows import Results, Row, is_peer, median, percentile
from shared.peers import PAGE, TransformersContinuous
from stage02_kv_cache.engine import Engine as SingleEngine
from stage03_batching.engine import Engine as StaticEngine

from . import timeline
from .cache import SlotCache
from .engine import Engine
from .request import Request
from .runner import Runner
from .scheduler import Scheduler

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
        decode = [[one for one in run if one.decode_tokens == slots] for run in runs[OURS].steps]
        yield group | {
            "step": [[step.seconds for step in steps] for steps in decode],
            "bookkeeping": [[step.bookkeeping_seconds for step in steps] for steps in decode],
        }


def win(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Answers of very different lengths; and what the slots did, for the charts."""
    lengths, (slots, steps) = workload(plan), plan.gantt
    group, runs = side_by_side(subject, ("sdpa",), lengths, plan.slots, plan.budget, plan.repeats)
    bars = timeline.bars(runs[OURS].steps[-1][:steps])
    drawn = [list(asdict(bar).values()) for bar in bars if bar.slot < slots]
    yield group | {"gantt": {"slots": slots, "steps": steps, "bars": drawn}}


def single(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A single request on the engines of three stages, with the slots of the winning case."""
    about: dict[str, Any] = {"slots": plan.slots, "budget": plan.budget}
    most = min(plan.prompts[1] + plan.answers[1], subject.config.n_positions)
    engines = {
        SINGLE: SingleEngine(subject.model),
        STATIC: StaticEngine(subject.model, max_batch=plan.slots),
        OURS: Engine(runner(subject, plan.slots, most), Scheduler(plan.slots, plan.budget)),
    }
    yield kit.compare(subject, engines, [plan.single], plan.single_repeats, "single", **about)[0]


def arrive(subject: Subject, plan: Sizes, engine: Engine) -> Group:
    """A long prompt arrives while its neighbours decode: seconds between their tokens before and
    after that, and until its own first token.

    The neighbours get a token each in every pass, so one list of gaps holds for all of them.
    """
    prompts = subject.prompts([plan.neighbours_prompt] * plan.neighbours, "neighbour")
    (long_prompt,) = subject.prompts([plan.long_prompt], "long")
    sampling = kit.greedy(1 + plan.before + plan.after)
    neighbours = [engine.add(Request(prompt, sampling)) for prompt in prompts]
    while not all(request.output.token_ids for request in neighbours):
        engine.step()
    before = [measure.seconds(engine.step) for _ in range(plan.before)]
    newcomer = engine.add(Request(long_prompt, kit.greedy(plan.long_answer)))
    after, first = [], 0.0
    for _ in range(plan.after):
        silent = not newcomer.output.token_ids
        after.append(measure.seconds(engine.step))
        first += after[-1] if silent else 0.0
    if any(request.output.finish_reason is None for request in neighbours):
        raise AssertionError("a neighbour went without a token in some pass")
    for _ in engine.run():
        pass
    proof = subject.prove(request.output for request in [*neighbours, newcomer])
    return {"before": before, "after": after, "seconds": first, "proof": proof}


def chunk_scheduler(plan: Mapping[str, Any], chunk: str) -> Scheduler:
    """Runs the long prompt in chunks of this many tokens, or whole; the budget has room for it
    all."""
    slots, budget = plan["neighbours"] + 1, plan["neighbours"] + plan["long_prompt"]
    if chunk == WHOLE:
        return Scheduler(slots, budget, chunked=False)
    return Scheduler(slots, budget, max_chunk=int(chunk))


def chunking(subject: Subject, plan: Sizes) -> Iterator[Group]:
    own = plan.neighbours_prompt + 1 + plan.before + plan.after
    most = max(plan.long_prompt + plan.long_answer, own)
    shared = runner(subject, plan.neighbours + 1, most)
    ways = {
        name: partial(arrive, subject, plan, Engine(shared, chunk_scheduler(asdict(plan), name)))
        for name in (*map(str, plan.chunks), WHOLE)
    }
    yield kit.by_variant(measure.turns(ways, plan.chunk_repeats))


def arrival(row: Row) -> tuple[float, float]:
    """Least seconds of the longest pass that the long prompt causes, and to its first token."""
    plan = row.results.plan
    count, before, long_prompt = (plan[key] for key in ("neighbours", "before", "long_prompt"))
    crowd = [(0, plan["neighbours_prompt"], 1 + before + plan["after"])] * count
    newcomer = (1 + before, long_prompt, plan["long_answer"])
    passes = simulate(chunk_scheduler(plan, row.variant), [*crowd, newcomer]).passes
    seconds = [
        row.least([pass_cost(row.config, row.kind, parts)])
        for parts in passes
        if any(part.request == count and part.cached < long_prompt for part in parts)
    ]
    return max(seconds), sum(seconds)


def chunked(results: Results, **where: str) -> list[Row]:
    """The neighbours alone, and beside a long prompt by its chunks."""
    found = results.groups("chunking", **where)
    return [row for group in found for row in (group, *group.variants)]


def chunk_name(row: Row) -> str:
    names = {"": "no long prompt", WHOLE: WHOLE}
    return names.get(row.variant, f"chunks of {row.variant}")


def gap(share: float) -> Callable[[Row], float]:
    """A percentile of the milliseconds between a neighbour's tokens, in all runs."""

    def value(row: Row) -> float:
        runs = row["after"] if row.variant else sum(row["before"].values(), [])
        return 1e3 * percentile(sum(runs, []), share)

    return value


def occupancy(row: Row) -> float:
    return 1.0 if row.variant == SINGLE else row["busy"] / (row["slots"] * row["passes"])


def cache(row: Row) -> str:
    pages = math.ceil(row.get("slot_tokens", 0) / PAGE) * PAGE * row["slots"]
    held = pages * row.config.kv_bytes_per_token(row.kind) if is_peer(row.variant) else row["bytes"]
    return f"{held / 1e6:,.0f}"


def share_of_step(row: Row) -> str:
    runs = [np.divide(own, step) for own, step in zip(row["bookkeeping"], row["step"], strict=True)]
    own = [median(run) for run in runs]
    return f"{median(np.concatenate(runs)):.1%} ({min(own):.1%} to {max(own):.1%})"


def passes(row: Row) -> str:
    done = f"{row['passes']:,}"
    return done if is_peer(row.variant) else f"{done} ({len(costs(row)):,})"


COLUMNS = rows.limits_of(least) | {
    "slots in use": lambda row: f"{occupancy(row):.0%}",
    "steps": passes,
    "steps (predicted)": passes,
    "cache, MB": cache,
    "over stage 03 (predicted)": rows.gain(STATIC, least),
    "over stage 02 (predicted)": rows.gain(SINGLE, least),
    "stage 04 over it": lambda row: f"{row.median / row.of(OURS).median:.2f}x",
    "same tokens": lambda row: row.alike(OURS, "stage 04") if "same" in row.group else row.proof,
    "step p50, ms": lambda row: f"{median(sum(row['step'], [])) * 1e3:.1f}",
    "scheduler, sampling, postprocessing p50, ms": lambda row: (
        f"{median(sum(row['bookkeeping'], [])) * 1e3:.2f}"
    ),
    "share p50": share_of_step,
    "steps with all rows": lambda row: sum(map(len, row["step"])),
    "long prompt": chunk_name,
    "ITL p50, ms": lambda row: f"{gap(0.5)(row):,.1f}",
    "p99, ms": lambda row: f"{gap(0.99)(row):,.1f}",
    "max, ms (limit)": lambda row: (
        f"{gap(1)(row):,.1f}" + (f" ({arrival(row)[0] * 1e3:,.1f})" if row.variant else "")
    ),
    "its first token, limit, ms": lambda row: (
        f"{rows.milliseconds(row['seconds'], 0)}, {arrival(row)[1] * 1e3:,.0f}"
        if row.variant
        else ""
    ),
    "tokens proved": lambda row: row.proof if row.variant else "",
}
TABLES = rows.tables(
    COLUMNS,
    """
    win: engine | tok/s | slots in use | steps (predicted) | over stage 03 (predicted)
      | same tokens
    win_seconds < win: dtype | engine | seconds, limit | cache, MB | stage 04 over it
    null: dtype | slots | engine | tok/s | seconds, limit | slots in use | steps (predicted)
      | over stage 03 (predicted)
    peers: dtype | slots | engine | tok/s | slots in use | steps | stage 04 over it | same tokens
    lose < single: dtype | engine | tok/s | limit, tok/s | slots in use | cache, MB
      | over stage 02 (predicted) | same tokens
    chunking: dtype | long prompt | ITL p50, ms | p99, ms | max, ms (limit)
      | its first token, limit, ms | tokens proved
    overhead < equal: dtype | slots | steps with all rows | step p50, ms
      | scheduler, sampling, postprocessing p50, ms | share p50
    """,
    null=lambda results: [row for row in results.rows("equal") if not is_peer(row.variant)],
    peers=lambda results: [row for row in results.rows("equal") if row.variant != STATIC],
    chunking=chunked,
)


def gantt_chart(results: Results) -> Figure:
    drawn = results["win"][0]["gantt"]
    bars = [timeline.Bar(*bar) for bar in drawn["bars"]]
    title = "Slots are handed on while their neighbours decode"
    return timeline.draw(bars, drawn["steps"], title, drawn["slots"])


def occupancy_chart(results: Results) -> Figure:
    """All places of all passes; those in use are dark."""
    (group,) = results.groups("win")
    title, drawn = "Places that compute for a request, and places that do not", {}
    for row in (group.of(OURS), group.of(STATIC)):
        share = f"{row['passes']:,} steps, {occupancy(row):.0%} of the places in use"
        drawn[f"{row.variant}: {share}"] = (row["rows"], row["slots"])
    return charts.bands(title, "forward pass", "rows in use", drawn)


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
CHARTS = {
    "gantt": gantt_chart,
    "occupancy": occupancy_chart,
    "chunking": rows.bars(
        lambda found: (
            f"In chunks, a prompt of {found[0].results.plan['long_prompt']} tokens holds its "
            "neighbours up less"
        ),
        ("milliseconds between tokens (GPT-2 124M shape, float32)",),
        partial(chunked, dtype="float32"),
        chunk_name,
        {"p50": gap(0.5), "p99": gap(0.99), "max": gap(1)},
    ),
}
BENCHMARK = kit.Benchmark("stage04_continuous", ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
