"""What a decision before every step buys, where it buys nothing, and what it costs:
`python -m stage04_continuous.benchmark`.

Throughput alone says little, so slot occupancy is shown beside it: of all places in the steps
(slots times steps), the share that computed for a request still in progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from shared import cli, measure
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing, faster
from shared.bench.forecast import CONTINUOUS as OURS
from shared.bench.forecast import STATIC, costs, least, pass_cost, simulate
from shared.bench.kit import Case, Group, Lengths, Subject
from shared.bench.rows import Results, Row, is_peer, percentile
from shared.peers import TransformersContinuous
from stage03_batching.engine import Engine as StaticEngine

from . import timeline
from .cache import SlotCache
from .engine import Engine
from .request import Request
from .runner import Runner
from .scheduler import Scheduler

WHOLE = "whole"  # a prompt that is not cut into chunks


# Win: the crowd. Null, and beside transformers: as many equal requests as slots. Lose: a long
# prompt arrives while its neighbours are in the middle of their answers.
FULL = kit.plan(
    models=("gpt2",), dtypes=kit.BOTH, **kit.CROWD, slots=24,
    equal_slots=(8, 32), equal=(16, 32), equal_repeats=(2, 1),  # for this stage, for the others
    neighbours=8, neighbours_prompt=64, before=24, after=64,  # tokens, before and after the arrival
    long_prompt=900, long_answer=8, chunks=(64, 128, 256), chunk_repeats=2,
    gantt=(16, 200),  # slots and steps of the winning run that are drawn
)  # fmt: skip


def runner(subject: Subject, slots: int, slot_tokens: int) -> Runner:
    return Runner(subject.model, SlotCache(subject.config, slots, slot_tokens, subject.dtype))


def side_by_side(
    subject: Subject, lengths: Lengths, slots: int, budget: int, repeats: tuple[int, int]
) -> tuple[Group, Any]:
    """One workload on stage 03, this stage and transformers, all with the same slots."""
    most = max(prompt + answer for prompt, answer in lengths)
    with TransformersContinuous(subject.peer("sdpa"), slots, most, budget) as peer:
        engines = {
            STATIC: StaticEngine(subject.model, max_batch=slots),
            OURS: Engine(runner(subject, slots, most), Scheduler(slots, budget)),
            "transformers, sdpa": kit.Peer(peer.generate, partial(getattr, peer, "passes")),
        }
        often = {name: repeats[name != OURS] for name in engines}
        about: dict[str, Any] = {"slots": slots, "slot_tokens": most, "budget": budget}
        return kit.compare(subject, engines, lengths, often, like=OURS, **about)


def equal(subject: Subject, plan: Any) -> Iterator[Group]:
    """Equal requests, one for each slot."""
    for slots in plan.equal_slots:
        budget = slots * plan.equal[0]
        yield side_by_side(subject, [plan.equal] * slots, slots, budget, plan.equal_repeats)[0]


def win(subject: Subject, plan: Any) -> Iterator[Group]:
    """Answers of very different lengths; and what the slots did, for the chart."""
    lengths, (slots, steps) = kit.crowd(plan), plan.gantt
    group, runs = side_by_side(subject, lengths, plan.slots, plan.budget, plan.repeats)
    bars = timeline.bars(runs[OURS].steps[-1][:steps])
    drawn = [list(asdict(bar).values()) for bar in bars if bar.slot < slots]
    yield group | {"gantt": {"slots": slots, "steps": steps, "bars": drawn}}


def arrive(subject: Subject, plan: Any, engine: Engine) -> Group:
    """A long prompt arrives while its neighbours decode: seconds between their tokens before and
    after that, and until its own first token.

    The neighbours get a token each in every pass, so one list of gaps serves them all.
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
    """A scheduler that runs the long prompt in chunks of `chunk` tokens, or whole; the budget has
    room for all of it."""
    slots, budget = plan["neighbours"] + 1, plan["neighbours"] + plan["long_prompt"]
    if chunk == WHOLE:
        return Scheduler(slots, budget, chunked=False)
    return Scheduler(slots, budget, max_chunk=int(chunk))


def chunking(subject: Subject, plan: Any) -> Iterator[Group]:
    neighbour = plan.neighbours_prompt + 1 + plan.before + plan.after
    most = max(plan.long_prompt + plan.long_answer, neighbour)
    shared = runner(subject, plan.neighbours + 1, most)
    ways = {
        name: partial(arrive, subject, plan, Engine(shared, chunk_scheduler(asdict(plan), name)))
        for name in (*map(str, plan.chunks), WHOLE)
    }
    yield kit.by_variant(measure.turns(ways, plan.chunk_repeats))


def arrival(row: Row) -> tuple[float, float]:
    """Least milliseconds of the longest pass that the long prompt causes, and to its first
    token."""
    plan = row.results.plan
    count, before, length = (plan[key] for key in ("neighbours", "before", "long_prompt"))
    neighbour = (0, plan["neighbours_prompt"], 1 + before + plan["after"])
    arrivals = [neighbour] * count + [(1 + before, length, plan["long_answer"])]
    taken = [
        1e3 * row.least([pass_cost(row.config, row.kind, parts)])
        for parts in simulate(chunk_scheduler(plan, row.variant), arrivals)
        if any(part.request == count and part.cached < length for part in parts)
    ]
    return max(taken), sum(taken)


def chunked(results: Results) -> list[Row]:
    """The neighbours alone, then beside a long prompt, by the size of its chunks."""
    return [row for group in results.groups("chunking") for row in (group, *group.variants)]


def chunk_name(row: Row) -> str:
    names = {"": "no long prompt", WHOLE: WHOLE}
    return names.get(row.variant, f"chunks of {row.variant}")


def gap(row: Row, share: float) -> float:
    """A percentile of the milliseconds between a neighbour's tokens, in all runs."""
    runs = row["after"] if row.variant else sum(row["before"].values(), [])
    return 1e3 * percentile(sum(runs, []), share)


def occupancy(row: Row) -> float:
    return row["busy"] / (row["slots"] * row["passes"])


def passes(row: Row) -> str:
    done = f"{row['passes']:,}"
    return done if is_peer(row.variant) else f"{done} ({len(costs(row)):,})"


COLUMNS = rows.limits_of(least) | {
    "slots in use": lambda row: f"{occupancy(row):.0%}",
    "steps (predicted)": passes,
    "over stage 03 (predicted)": rows.gain(STATIC, least),
    "same tokens": lambda row: row.alike(OURS, "stage 04"),
    "long prompt": chunk_name,
    "ITL p50, ms": lambda row: f"{gap(row, 0.5):,.1f}",
    "p99, ms": lambda row: f"{gap(row, 0.99):,.1f}",
    "max, ms (limit)": lambda row: (
        f"{gap(row, 1):,.1f}" + (f" ({arrival(row)[0]:,.1f})" if row.variant else "")
    ),
    "its first token, limit, ms": lambda row: (
        f"{rows.milliseconds(row['seconds'], 0)}, {arrival(row)[1]:,.0f}" if row.variant else ""
    ),
    "tokens proved": lambda row: row.proof if row.variant else "",
}


def crowd(results: Results) -> Row:
    """The winning case."""
    return results.groups("win")[0]


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts, for GPT-2 in float32."""
    row, pair = crowd(results), (STATIC, OURS)
    static, ours = map(row.of, pair)
    longest = max(answer for _, answer in row.lengths)
    full = max(longest, row.tokens / row["slots"])  # steps, were no slot ever empty
    yield Claim(
        "steps of the crowd, static over continuous",
        len(costs(static)) / len(costs(ours)), static["passes"] / ours["passes"], "x",
        "by hand no slot is ever empty, but the last long answers begin late and leave a tail",
        by_hand=len(costs(static)) / full,
    )  # fmt: skip
    yield faster(
        "seconds of the crowd, static over continuous", row, pair, least,
        "fewer steps, and each with about half as many rows as one of stage 03",
    )  # fmt: skip
    what, why = "the same for equal answers, all at once", "nothing to refill"
    yield faster(what, results.groups("equal", dtype="float32")[-1], pair, least, why)
    pieces, *_, whole = results.groups("chunking", dtype="float32")[0].variants
    for row, what, why in (
        (whole, "long prompt run whole",
         "a prefill reaches some 70 % of the best rate of a product"),
        (pieces, "chunks of 64",
         "products of 70 rows reach less of that rate, and a chunk attends, through a mask, to all "
         "chunks before it"),
    ):  # fmt: skip
        what = f"longest gap of a neighbour, {what}"
        yield Claim(what, arrival(row)[0], gap(row, 1), "ms", why)
    what, why = "first token of the long prompt, chunks of 64", "the same in all its steps"
    yield Claim(what, arrival(pieces)[1], pieces.median * 1e3, "ms", why)


TABLES = rows.tables(
    COLUMNS,
    """
    win: engine | tok/s | slots in use | steps (predicted) | over stage 03 (predicted)
      | same tokens
    null < equal: dtype | slots | engine | tok/s | seconds, limit | slots in use
      | steps (predicted) | over stage 03 (predicted) | same tokens
    chunking: dtype | long prompt | ITL p50, ms | p99, ms | max, ms (limit)
      | its first token, limit, ms | tokens proved
    """,
    chunking=chunked,
    claims=closing(claims),
)


def gantt_chart(results: Results) -> Figure:
    row = crowd(results)
    drawn, ours = row["gantt"], row.of(OURS)
    bars = [timeline.Bar(*bar) for bar in drawn["bars"]]
    part = (
        f"{drawn['slots']} of {row['slots']} slots, the first {drawn['steps']} of "
        f"{ours['passes']} steps"
    )
    return timeline.draw(bars, drawn["steps"], f"Slots are handed on: {part}", drawn["slots"])


def headline(results: Results) -> str:
    row = crowd(results)
    static, ours = (occupancy(row.of(name)) for name in (STATIC, OURS))
    return (
        f"{row.gain(STATIC, OURS):.1f}x static batching where answers differ in length: "
        f"{ours:.0%} of the slots in use instead of {static:.0%} (GPT-2 124M shape, {row['dtype']})"
    )


CHARTS = {"gantt": gantt_chart}
WORK = kit.cases(Case(equal), Case(win, dtypes=1), Case(chunking))
BENCHMARK = kit.Benchmark("stage04_continuous", __doc__, FULL, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
