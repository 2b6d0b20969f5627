"""What memory in blocks buys, where it buys nothing, and what it costs:
`python -m stage05_paged.benchmark`.

Stage 04 and this stage run in turn and, where it matters, with the same memory for keys and values.
Every answer is proved; a single pass is checked against the contiguous cache.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import count as counting
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn.functional import pad
from tqdm import tqdm

from shared import charts, cli, measure
from shared.bench import forecast, kit, rows
from shared.bench.claims import Claim, closing, faster
from shared.bench.forecast import CONTINUOUS, Part, simulate
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, median
from shared.measure import Summary, summarize
from stage01_forward.generation import Output
from stage04_continuous.cache import SlotCache
from stage04_continuous.engine import make as make_slots
from stage04_continuous.request import Request, State
from stage04_continuous.runner import Runner
from stage04_continuous.scheduler import Scheduler as SlotScheduler

from .blockmap import blockmap, picture
from .blocks import BlockPool
from .cache import PagedCache
from .engine import Engine, make
from .memory import Cost, block_bytes, free_memory, measure_cost
from .scheduler import Scheduler

OURS = "stage 05, paged"
WIN, NULL = "answers of unlike lengths", "all at full length"
MISS, HIT = "shared, first request", "shared, later ones"
FRESH_ON, FRESH_OFF = "none shared, caching on", "none shared, caching off"
RECOMPUTE, SWAP, FOUND = "recompute", "swap", "recompute, own blocks cached"
QUEUE = 10  # times the workload: a queue that lasts much longer than the memory takes to fill
DRAWN = 48  # blocks on the map: more would be thinner than their numbers


# The memory is in tokens; a contiguous engine divides it into whole contexts. Win: the crowd. Null:
# requests that fill a context each. Lose: the gather.
FULL = kit.plan(
    models=("gpt2", "stories"), dtypes=kit.BOTH, **kit.CROWD, memory=4096, block_size=16,
    null=(6, 960, 64), null_repeats=2,  # requests, prompt, answer
    rows=(1, 32), contexts=(64, 128, 256, 512, 1008), gather_repeats=5,
    sizes=(1, 8, 16, 32, 128), sized=256,  # context where the block size varies
    system=512, own=32, prefix_repeats=3,  # tokens that all prompts share, and of each alone
    preempted=(32, 128, 512, 960), plain_steps=3, preemption_repeats=2,
    frames=150,  # passes of the winning run on the map of the blocks
)  # fmt: skip


# ---- the same memory ----------------------------------------------------------------------------


def start_cold(engine: Engine) -> None:
    """Evict all cached blocks of an engine without requests, so that no request finds an earlier
    one's blocks."""
    pool = engine.scheduler.pool
    for block in reversed([pool.take() for _ in range(pool.count)]):  # reversed: the order stays
        pool.give_back(block)


class Cold:
    """The paged engine in the memory of a plan; every call starts with an empty prefix cache."""

    def __init__(self, subject: Subject, plan: Any) -> None:
        pool = BlockPool(plan.memory // plan.block_size, plan.block_size)
        rows, budget = min(pool.count, plan.budget), plan.budget
        self.engine = make(subject.model, pool=pool, max_sequences=rows, token_budget=budget)
        self.runner, self.steps = self.engine.runner, self.engine.steps

    def generate(self, prompts: list[list[int]], sampling: Sequence[Any]) -> list[Output]:
        start_cold(self.engine)
        return self.engine.generate(prompts, sampling)


def capacity(subject: Subject, plan: Any) -> Iterator[Group]:
    """Workloads in the same memory, contiguous and paged. "crowded": mean sequences in a
    pass, over the passes after which others still waited."""
    about: dict[str, Any] = {
        "slots": plan.memory // subject.config.n_positions,
        "blocks": plan.memory // plan.block_size,
        "block_size": plan.block_size,
        "budget": plan.budget,
    }
    requests, *request = plan.null
    loads: dict[str, tuple[Any, dict[str, int]]] = {
        WIN: (kit.crowd(plan), dict(zip((OURS, CONTINUOUS), plan.repeats, strict=True))),
        NULL: ([tuple(request)] * requests, dict.fromkeys((CONTINUOUS, OURS), plan.null_repeats)),
    }
    for case, (lengths, repeats) in loads.items():
        engines = {
            CONTINUOUS: make_slots(subject.model, about["slots"], token_budget=plan.budget),
            OURS: Cold(subject, plan),
        }
        group, runs = kit.compare(subject, engines, lengths, repeats, case=case, **about)
        group |= {"crowded": {}, "preemptions": {}}
        for name, run in runs.items():
            crowds = [step.rows for step in run.steps[-1] if step.waiting]
            group["crowded"][name] = sum(crowds) / max(len(crowds), 1)
            preempted = (getattr(step, "preempted", 0) for step in run.steps[-1])
            group["preemptions"][name] = sum(preempted)
        yield group


def waste(subject: Subject, plan: Any) -> Iterator[Group]:
    """Tokens reserved and used in all passes of the winning case, with memory for all requests: by
    the schedulers alone, without a model."""
    context, lengths = subject.config.n_positions, kit.crowd(plan)
    passes = simulate(SlotScheduler(plan.requests, plan.budget), lengths)
    parts = [part for pass_parts in passes for part in pass_parts]
    used = sum(part.cached + part.count for part in parts)

    def owned(size: int) -> int:
        pool, blocks = BlockPool(plan.requests * -(-context // size), size), list[int]()
        scheduler = Scheduler(pool, min(pool.count, plan.budget), plan.budget)
        simulate(scheduler, lengths, lambda: blocks.append(pool.owned))
        return size * sum(blocks)

    reservations = {
        "contiguous, whole context": context * len(parts),
        "contiguous, exact length known": sum(sum(lengths[p.request]) - 1 for p in parts),
        **{f"paged, blocks of {size}": owned(size) for size in plan.sizes},
    }
    for name, reserved in reservations.items():
        yield {"name": name, "memory": [reserved, used]}


def block_map(subject: Subject, plan: Any) -> Iterator[Group]:
    """What each block held after each of the first passes of the winning case: [state, passes]
    pairs, in one list per block."""
    engine, lengths = Cold(subject, plan).engine, kit.crowd(plan)
    prompts = subject.prompts(prompt for prompt, _ in lengths)
    for prompt, (_, answer) in zip(prompts, lengths, strict=True):
        engine.add(Request(prompt, kit.greedy(answer)))
    frames: list[list[int]] = []
    while len(frames) < plan.frames and engine.requests:
        engine.step()
        frames.append(blockmap(engine.scheduler))
    yield {"blocks": [kit.run_lengths(states) for states in zip(*frames, strict=True)]}


# ---- what the gather costs ----------------------------------------------------------------------


def pair(subject: Subject, count: int, context: int, size: int) -> tuple[dict[str, Any], int]:
    """A decode pass over `count` sequences of `context` tokens: in a contiguous cache, and in
    shuffled blocks that hold the same. Also the bytes that the paged pass gathers in all layers:
    counted, not calculated."""
    config, dtype = subject.config, subject.dtype
    held = SlotCache(config, count, context + 1, dtype)
    held.kv.normal_(generator=torch.Generator().manual_seed(0))
    per_row = -(-(context + 1) // size)  # blocks of a sequence
    paged = PagedCache(config, count * per_row, size, dtype=dtype)
    order = list(range(count * per_row))
    random.Random("blocks").shuffle(order)
    tables = [order[row * per_row : (row + 1) * per_row] for row in range(count)]
    for row, blocks in enumerate(tables):
        lines = pad(held.kv[:, :, row], (0, 0, 0, per_row * size - context - 1))
        paged.kv[:, :, :, blocks] = lines.unflatten(3, (per_row, size))
    ids, every = [row % config.vocab_size for row in range(count)], range(count)
    slots = [(row, context, 1) for row in every]
    shares = [(table, context, 1) for table in tables]
    ways = {
        "contiguous": partial(Runner(subject.model, held).run, ids, slots, every),
        "paged": partial(Runner(subject.model, paged).run, ids, shares, every),
    }
    copied = sum(tile.target.nbytes for tile in paged.extend(shares).tiles)
    return ways, len(paged.kv) * copied


def gather(subject: Subject, plan: Any) -> Iterator[Group]:
    """A decode pass over equal sequences, contiguous and paged: of several contexts, and with
    blocks of several sizes."""
    wanted = [(count, context, plan.block_size) for count in plan.rows for context in plan.contexts]
    sizes = [size for size in plan.sizes if size != plan.block_size]
    for count, context, size in wanted + [(max(plan.rows), plan.sized, size) for size in sizes]:
        needed = 2 * count * context * subject.config.kv_bytes_per_token(subject.dtype)
        if needed > free_memory() / 2:
            tqdm.write(f"note: {count} sequences of {context} tokens: left out, no memory")
            continue
        ways, copied = pair(subject, count, context, size)
        proof = kit.prove(ways["contiguous"]().float(), ways["paged"]().argmax(-1), subject.dtype)
        seconds = measure.alternate(ways, plan.gather_repeats)
        about = {"rows": count, "context": context, "block_size": size, "bytes": copied}
        yield {**about, "seconds": seconds, "proof": proof}


# ---- prefixes and preemption --------------------------------------------------------------------


def prefix(subject: Subject, plan: Any) -> Iterator[Group]:
    """Seconds to a request's first token, with and without a cached beginning."""
    length, numbers = plan.system + plan.own, counting()
    (system,) = subject.prompts([plan.system], "system")
    options: dict[str, Any] = {"max_sequences": 1, "token_budget": length}
    options["block_size"] = plan.block_size
    engines = {on: make(subject.model, 2, prefix_caching=on, **options) for on in (True, False)}

    def first_token(name: str) -> dict[str, Any]:
        engine = engines[name != FRESH_OFF]
        start_cold(engine)
        if name == HIT:
            engine.generate([system + subject.prompts([plan.own], "earlier")[0]], kit.greedy(1))
        begin = system if name in (MISS, HIT) else []
        (rest,) = subject.prompts([length - len(begin)], f"{name} {next(numbers)}")
        engine.steps.clear()
        ids: list[int] = []
        tokens = (token.id for token in engine.stream(begin + rest, kit.greedy(2)))
        seconds = measure.seconds(lambda: ids.append(next(tokens)))
        proof = subject.prove([Output(begin + rest, [*ids, *tokens])])
        computed = sum(step.prefill_tokens for step in engine.steps)
        return {"seconds": seconds, "computed": computed, "proof": proof}

    ways = {name: partial(first_token, name) for name in (MISS, HIT, FRESH_ON, FRESH_OFF)}
    about = {"system": plan.system, "own": plan.own, "block_size": plan.block_size}
    yield about | kit.by_variant(measure.turns(ways, plan.prefix_repeats))


def preemption(subject: Subject, plan: Any) -> Iterator[Group]:
    """What it costs a request to lose its memory, at several lengths."""
    context, size = subject.config.n_positions, plan.block_size
    options: dict[str, Any] = {"max_sequences": 1, "token_budget": context, "preemption": SWAP}
    swap_pool = BlockPool(-(-context // size), size)
    engine = make(subject.model, 1, swap_pool=swap_pool, block_size=size, **options)
    cost = measure_cost(engine.runner, engine.scheduler.pool, swap_pool, subject.dtype)
    rates = {"flops": cost.flops, "bandwidth": cost.bandwidth, "overhead": cost.overhead}
    for context in plan.preempted:
        ways = {
            way: partial(preempt, subject, engine, context, plan.plain_steps, way)
            for way in (RECOMPUTE, SWAP, FOUND)
        }
        results = kit.by_variant(measure.turns(ways, plan.preemption_repeats))
        yield {"context": context, "rates": rates, **results}


def preempt(subject: Subject, engine: Engine, context: int, steps: int, way: str) -> dict[str, Any]:
    """Seconds to the next token of a request that has just lost its blocks, less those of a plain
    step, and the proof of the answer."""
    scheduler = engine.scheduler
    scheduler.preemption = SWAP if way == SWAP else RECOMPUTE
    scheduler.prefix_caching = way == FOUND
    start_cold(engine)
    (prompt,) = subject.prompts([context - steps], "preempted")
    request = engine.add(Request(prompt, kit.greedy(steps + 2)))
    engine.step()
    plain = median(measure.seconds(engine.step) for _ in range(steps))
    others = [scheduler.pool.take() for _ in range(scheduler.pool.available)]
    taken = measure.seconds(engine.step)  # it needs a block, but none is available
    if request.state is not State.WAITING:
        raise AssertionError(f"{context} tokens do not fill their blocks: no block was needed")
    for block in others:
        scheduler.pool.give_back(block)
    taken += measure.seconds(engine.step)
    if request.state is not State.FINISHED:
        raise AssertionError("the request was not resumed in the step after it was preempted")
    return {"seconds": taken - plain, "proof": subject.prove([request.output])}


# ---- predictions --------------------------------------------------------------------------------


def gathered(row: Row, parts: Sequence[Part]) -> int:
    """Bytes that a pass gathers: the whole blocks of each part, except for whole prompts, which
    need nothing cached."""
    size = row["block_size"]
    blocks = sum(-(-(part.cached + part.count) // size) for part in parts if part.cached)
    return blocks * block_bytes(row.config, row.kind, size)


def pass_seconds(row: Row, parts: Sequence[Part], gathers: bool = True) -> float:
    """The least seconds for a pass. A gather adds the time of reading what it copies: nothing
    computes meanwhile, and attention then reads the copy from the processor's cache."""
    seconds = row.least([forecast.pass_cost(row.config, row.kind, parts)])
    return seconds + (gathered(row, parts) / row.bandwidth if gathers else 0)


@cache
def pass_times(row: Row) -> list[float]:
    """The least seconds of each pass of a row's engine for its workload."""
    if row.variant != OURS:
        return [row.least([cost]) for cost in forecast.costs(row)]
    pool = BlockPool(row["blocks"], row["block_size"])
    scheduler = Scheduler(pool, min(pool.count, row["budget"]), row["budget"])
    return [pass_seconds(row, parts) for parts in simulate(scheduler, row.lengths)]


def least(row: Row) -> float:
    return sum(pass_times(row))


def overhead(row: Row) -> float:
    """Predicted time of a pass, paged over contiguous."""
    parts = [Part(number, row["context"], 1) for number in range(row["rows"])]
    return pass_seconds(row, parts) / pass_seconds(row, parts, gathers=False)


def first_token_limit(row: Row) -> float:
    """Least seconds to the first token, with what the prefix cache holds."""
    system = row["system"]
    cached, new = (system, row["own"]) if row.variant == HIT else (0, system + row["own"])
    return pass_seconds(row, [Part(0, cached, new)])


def lost(way: str, row: Row, **rates: float) -> float:
    """Milliseconds that a preemption costs, at `rates` or else those that the scheduler uses."""
    cost = Cost(row.config, row.kind, **(rates or row["rates"]))
    return 1e3 * float(getattr(cost, way)(row["context"]))


# ---- tables and charts --------------------------------------------------------------------------


def win(results: Results) -> Row:
    return results.groups("capacity", case=WIN)[0]


def most_rows(row: Row) -> int:
    return max(rows for rows, _ in row["rows"])


def held(row: Row, weighted: bool) -> float:
    """Tokens that a request of a workload holds on average: over requests, or weighted by the steps
    that each of them runs."""
    weights = [answer if weighted else 1 for _, answer in row.lengths]
    tokens = [prompt + answer / 2 for prompt, answer in row.lengths]
    return sum(map(operator.mul, weights, tokens)) / sum(weights)


def steady(row: Row) -> float:
    """Sequences at once while requests wait, from a tenth of the steps on, in a queue that is QUEUE
    workloads long: by the scheduler alone, without a model."""
    pool = BlockPool(row["blocks"], row["block_size"])
    scheduler = Scheduler(pool, min(pool.count, row["budget"]), row["budget"])
    seen: list[tuple[int, int]] = []
    simulate(
        scheduler,
        row.lengths * QUEUE,
        lambda: seen.append((len(scheduler.running), len(scheduler.waiting))),
    )
    crowds = [running for running, waiting in seen[len(seen) // 10 :] if waiting]
    return sum(crowds) / max(len(crowds), 1)


def ratios(row: Row) -> Summary:
    """Time of a pass, paged over contiguous, for each pair that ran side by side."""
    taken = zip(row["seconds"]["paged"], row["seconds"]["contiguous"], strict=True)
    return summarize([paged / other for paged, other in taken])


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts, for GPT-2 in float32."""
    crowd, pair, plan = win(results), (CONTINUOUS, OURS), results.plan
    tokens = held(crowd, weighted=True)
    why = f"long answers stay longer: weighted by their stay, requests hold {tokens:.0f} tokens"
    what = "sequences at once in the memory of 4 slots, while a queue lasts"
    fit = crowd["blocks"] / math.ceil(held(crowd, weighted=False) / crowd["block_size"])
    yield Claim(what, fit, steady(crowd), "", why)
    yield faster(
        "seconds of the crowd, slots over blocks", crowd, pair, least,
        "a step over four rows reads the weights, one over many rows computes; both reach similar "
        "shares of their bounds",
    )  # fmt: skip
    (null,) = results.groups("capacity", case=NULL)
    what, why = (
        "the same where every request fills a slot",
        "no more requests fit, and the gather still costs time",
    )
    yield faster(what, null, pair, least, why)
    where = {"rows": max(plan["rows"]), "block_size": plan["block_size"]}
    steps = results.groups("gather", dtype="float32", **where)
    step = steps[len(steps) // 2]  # at the context in the middle
    what = "a step of 32 rows at context 256, blocks over slots"
    why = "even without the gather the step misses its bound, so the gather is a smaller share"
    yield Claim(what, overhead(step), ratios(step).median, "x", why)
    what = "first token of 544 tokens, 512 of which are found"
    why = "a step of 32 rows reaches less of its bound than one of 544"
    yield faster(what, results.groups("prefix")[0], (MISS, HIT), first_token_limit, why)
    preempted = rows.first("preemption")(results)[-2]
    for way, why in (
        (RECOMPUTE, "a prefill reaches some 70 % of the best rate of a product"),
        (SWAP, "the bound reads each byte once; a copy also writes it, to cold pages"),
    ):  # fmt: skip
        best = lost(way, preempted, flops=preempted.peak, bandwidth=preempted.bandwidth)
        yield Claim(
            f"preemption at 512 tokens, {way}", best, 1e3 * preempted.of(way).median, "ms", why
        )


COLUMNS: dict[str, rows.Column] = {
    "workload": lambda row: f"{row.requests}, {row['case']}",
    "steps (predicted)": lambda row: f"{row['passes']:,} ({len(pass_times(row)):,})",
    "over stage 04 (predicted)": rows.gain(CONTINUOUS, least),
    "same tokens": lambda row: (
        row.alike(CONTINUOUS, "stage 04") if "case" in row.group else row.proof
    ),
    **rows.limits_of(least),
    "most at once": most_rows,
    "mean while others wait": "crowded:.1f",
    "mean at once": lambda row: f"{row['busy'] / row['passes']:.1f}",
    "memory is taken": "name",
    "memory unused": lambda row: f"{1 - row['memory'][1] / row['memory'][0]:.1%}",
    "sequences": "rows",
    "block size": "block_size",
    "paged over contiguous, predicted": lambda row: f"{ratios(row).show(2)}, {overhead(row):.2f}",
    "gathered, MB": "bytes * 1e-6:,.0f",
    "prefix": "variant",
    "TTFT, limit, ms": lambda row: f"{row.ms}, {first_token_limit(row) * 1e3:.1f}",
    "tokens computed": lambda row: f"{median(row['computed']):,.0f}",
    "over the first (predicted)": rows.gain(MISS, first_token_limit),
    "recompute, predicted, ms": lambda row: f"{row.of(RECOMPUTE).ms}, {lost(RECOMPUTE, row):.1f}",
    "swap, predicted, ms": lambda row: f"{row.of(SWAP).ms}, {lost(SWAP, row):.1f}",
    "recompute with own blocks cached, ms": lambda row: row.of(FOUND).ms,
    "tokens proved": lambda row: row.of(FOUND).proof,
}
TABLES = rows.tables(
    COLUMNS,
    """
    capacity: workload | engine | tok/s | steps (predicted) | over stage 04 (predicted)
      | same tokens
    capacity_memory < capacity: workload | engine | most at once | mean while others wait
      | mean at once | preemptions | cache, MB | seconds, limit
    waste: memory is taken | memory unused
    gather: dtype | sequences | context | block size | contiguous, ms | paged, ms
      | paged over contiguous, predicted | gathered, MB | same tokens
    prefix < requests: model | prefix | TTFT, limit, ms | tokens computed
      | over the first (predicted) | same tokens
    preemption: model | context | recompute, predicted, ms | swap, predicted, ms
      | recompute with own blocks cached, ms | tokens proved
    """,
    requests=lambda results: results.rows("prefix"),
    claims=closing(claims),
)


def capacity_chart(results: Results) -> Figure:
    """Sequences in each pass of the winning case, contiguous and paged."""
    group, bands = win(results), {}
    most = most_rows(group.of(OURS))
    for row in (group.of(CONTINUOUS), group.of(OURS)):
        mean = f"{row['busy'] / row['passes']:.1f} on average"
        words = f"{row.variant}: {row['passes']:,} steps, up to {most_rows(row)} sequences, {mean}"
        bands[words] = (row["rows"], most_rows(row))
    title = f"In the memory of {group['slots']} whole contexts, up to {most} sequences"
    return charts.bands(title, "step", "sequences in it", bands)


def blocks_chart(results: Results) -> Figure:
    blocks = results["block_map"][0]["blocks"]
    drawn = [[state for state, n in runs for _ in range(n)] for runs in blocks[:DRAWN]]
    title = f"Freed blocks go on to the next sequence (the first {DRAWN} of {len(blocks)} blocks)"
    return picture(list(map(list, zip(*drawn, strict=True))), title)


def headline(results: Results) -> str:
    ours = win(results).of(OURS)
    return (
        f"in the memory of {ours['slots']} slots, {steady(ours):.0f} sequences at once while "
        f"others wait, and {ours.gain(CONTINUOUS, OURS):.1f}x the tok/s (GPT-2 124M shape, "
        f"{ours['dtype']})"
    )


CHARTS = {"capacity": capacity_chart, "blocks": blocks_chart}
WORK = kit.cases(
    Case(gather),
    *(Case(run, dtypes=1) for run in (capacity, block_map, waste)),
    *(Case(run, models=None, dtypes=1) for run in (prefix, preemption)),
)
BENCHMARK = kit.Benchmark("stage05_paged", __doc__, FULL, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
