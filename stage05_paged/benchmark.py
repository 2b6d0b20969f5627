"""What memory in blocks buys, where it buys nothing, and what it costs:
`python -m stage05_paged.benchmark`.

Stages 02 to 04 and this one run in turn, and where it matters in the same memory for keys and
values. Every answer is proved; the judge of a single pass is the contiguous cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count as counting
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn.functional import pad
from tqdm import tqdm

from shared import charts, cli, measure
from shared.bench import forecast, kit, rows
from shared.bench.forecast import CONTINUOUS, SINGLE, STATIC, Part, Watch
from shared.bench.kit import Case, Group, Lengths, Runs, Subject
from shared.bench.rows import Results, Row, median
from shared.checkpoint import PRESETS
from shared.measure import summarize
from stage01_forward.generation import Output
from stage02_kv_cache.engine import Engine as SingleEngine
from stage03_batching.engine import Engine as StaticEngine
from stage04_continuous.cache import SlotCache
from stage04_continuous.make import make as make_slots
from stage04_continuous.request import Request, State
from stage04_continuous.runner import Runner
from stage04_continuous.scheduler import Scheduler as SlotScheduler

from .blockmap import blockmap, picture
from .blocks import BlockPool
from .cache import PagedCache
from .engine import Engine, make
from .memory import Cost, block_bytes, free_memory, measure_cost
from .scheduler import Scheduler

OURS, PAGED_STATIC = "stage 05, paged", "stage 05, in static batches"
WIN, NULL = "answers of unlike lengths", "all at full length"
MISS, HIT = "shared, first request", "shared, later ones"
FRESH_ON, FRESH_OFF = "none shared, caching on", "none shared, caching off"
RECOMPUTE, SWAP, FOUND = "recompute", "swap", "recompute, own blocks cached"
DRAWN = 48  # blocks on the map: more would be thinner than a letter


@dataclass(frozen=True)
class Sizes(kit.Plan):
    """Lengths, budgets (of a pass) and the memory are in tokens."""

    models: tuple[str, ...] = ("gpt2", "stories")
    memory: int = 4096  # the same for all; a contiguous engine makes whole contexts of it
    block_size: int = 16
    budget: int = 256
    # Win: answers of very different lengths, nearly all much shorter than the context.
    requests: int = 72
    prompts: tuple[int, int] = (16, 64)
    answers: tuple[int, int] = (8, 256)
    middle: int = 48
    repeats: tuple[int, int] = (2, 1)  # of this stage, of the others
    null: tuple[int, int, int] = (6, 960, 64)  # requests, prompt, answer: each fills a context
    null_repeats: int = 2
    # Lose: one request, and the gather.
    singles: tuple[tuple[int, int], ...] = ((64, 64), (900, 32))
    single_repeats: int = 2
    rows: tuple[int, ...] = (1, 32)
    contexts: tuple[int, ...] = (64, 128, 256, 512, 1008)
    sizes: tuple[int, ...] = (1, 8, 16, 32, 128)
    sized: int = 256  # context of the most rows where the block size varies, and in the profile
    gather_repeats: int = 5
    # A table by arithmetic: memory against sequences.
    batches: tuple[int, ...] = (1, 8, 32, 128, 256, 512)
    table: tuple[int, int, int] = (1900, 16, 50)  # blocks, prompt, answer
    # A system prompt that all requests share, and what each has of its own.
    system: int = 512
    own: int = 32
    prefix_repeats: int = 3
    preempted: tuple[int, ...] = (32, 128, 512, 960)
    plain_steps: int = 3
    preemption_repeats: int = 2
    frames: int = 150  # passes of the winning run on the map of the blocks


FULL = Sizes()
QUICK = kit.quick(FULL)


def workload(plan: Sizes) -> Lengths:
    """The requests of the winning case, as in stage 04."""
    return kit.lognormal(plan.requests, plan.prompts, plan.answers, plan.middle)


# ---- the same memory ----------------------------------------------------------------------------


def start_cold(pool: BlockPool) -> None:
    """Evict all cached blocks of a pool of which none is owned, so that no request finds a block of
    an earlier one."""
    for block in reversed([pool.take() for _ in range(pool.count)]):  # the order stays
        pool.give_back(block)


class Cold:
    """The paged engine in the memory of a plan; every call starts with an empty prefix cache.

    batch: at most this many prompts at a time, the next ones when the last of them has ended, as a
    static engine takes them; 0: all.
    """

    def __init__(self, subject: Subject, plan: Sizes, budget: int, batch: int = 0) -> None:
        pool = BlockPool(plan.memory // plan.block_size, plan.block_size)
        rows = min(pool.count, budget)
        self.engine = make(subject.model, pool=pool, max_sequences=rows, token_budget=budget)
        self.runner, self.batch = self.engine.runner, batch
        self.steps: list[Any] = []

    def generate(self, prompts: list[list[int]], sampling: Sequence[Any]) -> list[Output]:
        start_cold(self.engine.scheduler.pool)
        self.steps, outputs = [], []
        size = self.batch or len(prompts)
        for at in range(0, len(prompts), size):
            outputs += self.engine.generate(prompts[at : at + size], sampling[at : at + size])
            self.steps += self.engine.steps
        return outputs


def side_by_side(
    subject: Subject,
    plan: Sizes,
    lengths: Lengths,
    repeats: Mapping[str, int],
    budget: int,
    name: str = "request",
) -> tuple[Group, dict[str, Runs]]:
    """The engines of `repeats` in turn, in the same memory. A static batch of the paged one is as
    many requests as fit at their average length."""
    model, slots = subject.model, plan.memory // subject.config.n_positions
    blocks, mean = plan.memory // plan.block_size, math.ceil(sum(map(sum, lengths)) / len(lengths))
    batch = blocks // -(-mean // plan.block_size)
    engines = {
        SINGLE: lambda: SingleEngine(model),
        STATIC: lambda: StaticEngine(model, max_batch=slots),
        CONTINUOUS: lambda: make_slots(model, slots, token_budget=budget),
        OURS: lambda: Cold(subject, plan, budget),
        PAGED_STATIC: lambda: Cold(subject, plan, budget, batch),
    }
    fields: dict[str, Any] = {"budget": budget, "slots": slots, "batch": batch}
    fields |= {"blocks": blocks, "block_size": plan.block_size}
    made = {variant: engines[variant]() for variant in repeats}
    return kit.compare(subject, made, lengths, repeats, name, **fields)


def capacity(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Workloads in the same memory, contiguous and paged; the winning one in static batches too.
    "crowded": sequences in a pass, on average over those after which others still waited."""
    ours, others = plan.repeats
    requests, prompt, answer = plan.null
    often = {CONTINUOUS: others, OURS: ours, STATIC: others, PAGED_STATIC: others}
    loads: dict[str, tuple[Lengths, dict[str, int]]] = {
        WIN: (workload(plan), often),
        NULL: ([(prompt, answer)] * requests, dict.fromkeys((CONTINUOUS, OURS), plan.null_repeats)),
    }
    for case, (lengths, repeats) in loads.items():
        group, runs = side_by_side(subject, plan, lengths, repeats, plan.budget)
        group |= {"case": case, "crowded": {}, "preemptions": {}}
        for name in (name for name in repeats if name != STATIC):
            steps = runs[name].steps[-1]
            crowds = [step.rows for step in steps if step.waiting]
            group["crowded"][name] = sum(crowds) / len(crowds) if crowds else 0.0
            group["preemptions"][name] = sum(getattr(step, "preempted", 0) for step in steps)
        yield group


def single(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A single request on the engines of three stages, each of which runs its prompt whole."""
    repeats = dict.fromkeys((SINGLE, CONTINUOUS, OURS), plan.single_repeats)
    for lengths in plan.singles:
        budget = max(plan.budget, lengths[0])
        yield side_by_side(subject, plan, [lengths], repeats, budget, "single")[0]


def in_blocks(count: int, size: int, budget: int, lengths: Lengths) -> Watch:
    """What this stage's scheduler plans of some requests, with a pool."""
    pool = BlockPool(count, size)
    scheduler = Scheduler(pool, min(count, budget), budget)
    return forecast.simulate(scheduler, lengths, lambda: pool.owned * size)


def in_slots(count: int, size: int, budget: int, lengths: Lengths) -> Watch:
    """What stage 04's plans, with slots of `size` tokens; 0: each for just its request."""
    scheduler = SlotScheduler(count, budget)

    def reserved() -> int:
        running = scheduler.running
        return sum(size or len(one.prompt_ids) + one.sampling.max_tokens - 1 for one in running)

    return forecast.simulate(scheduler, lengths, reserved)


def waste(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Tokens reserved and used in the winning case with memory for all requests: by the schedulers
    alone, without a model."""
    context, lengths, found = subject.config.n_positions, workload(plan), {}
    for name, size in (("whole context", context), ("exact length known", 0)):
        found[f"contiguous, {name}"] = in_slots(plan.requests, size, plan.budget, lengths)
    for size in plan.sizes:
        count = plan.requests * -(-context // size)
        found[f"paged, blocks of {size}"] = in_blocks(count, size, plan.budget, lengths)
    for name, watch in found.items():
        yield {"name": name, "memory": watch.memory}


def block_map(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """What each block held after each of the first passes of the winning case: [state, passes]
    pairs, a list a block."""
    engine, lengths = Cold(subject, plan, plan.budget).engine, workload(plan)
    prompts = subject.prompts(prompt for prompt, _ in lengths)
    for prompt, (_, answer) in zip(prompts, lengths, strict=True):
        engine.add(Request(prompt, kit.greedy(answer)))
    frames: list[list[int]] = []
    while len(frames) < plan.frames and engine.requests:
        engine.step()
        frames.append(blockmap(engine.scheduler))
    yield {"blocks": [kit.run_lengths(states) for states in zip(*frames, strict=True)]}


# ---- what the gather costs ----------------------------------------------------------------------


class Pair:
    """A contiguous cache and a paged one that hold the same `context` tokens of each of `count`
    sequences, the blocks shuffled. `contiguous` and `paged` are a decode pass over them."""

    def __init__(self, subject: Subject, count: int, context: int, size: int) -> None:
        config, dtype = subject.config, subject.dtype
        held = SlotCache(config, count, context + 1, dtype)
        held.kv.normal_(generator=torch.Generator().manual_seed(0))
        each = -(-(context + 1) // size)  # blocks of a sequence
        self.cache = PagedCache(config, count * each, size, dtype=dtype)
        order = list(range(count * each))
        random.Random("blocks").shuffle(order)
        self.tables = [order[row * each : (row + 1) * each] for row in range(count)]
        for row, blocks in enumerate(self.tables):
            lines = pad(held.kv[:, :, row], (0, 0, 0, each * size - context - 1))
            self.cache.kv[:, :, :, blocks] = lines.unflatten(3, (each, size))
        ids, every = [row % config.vocab_size for row in range(count)], range(count)
        slots = [(row, context, 1) for row in every]
        self.shares = [(table, context, 1) for table in self.tables]
        self.contiguous = partial(Runner(subject.model, held).run, ids, slots, every)
        self.paged = partial(Runner(subject.model, self.cache).run, ids, self.shares, every)

    @property
    def gathered(self) -> int:
        """Bytes that a paged pass copies together, in all layers: counted, not worked out."""
        tiles = self.cache.extend(self.shares).tiles
        return len(self.cache.kv) * sum(tile.target.nbytes for tile in tiles)


def gather(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A decode pass over equal sequences, contiguous and paged: of several contexts, and with
    blocks of several sizes."""
    wanted = [(count, context, plan.block_size) for count in plan.rows for context in plan.contexts]
    sizes = [size for size in plan.sizes if size != plan.block_size]
    for count, context, size in wanted + [(max(plan.rows), plan.sized, size) for size in sizes]:
        needed = 2 * count * context * subject.config.kv_bytes_per_token(subject.dtype)
        if needed > free_memory() / 2:
            what = f"{count} sequences of {context} tokens take {needed / 1e9:.1f} GB"
            tqdm.write(f"note: {what} in two caches: left out")
            continue
        pair = Pair(subject, count, context, size)
        ways = {"contiguous": pair.contiguous, "paged": pair.paged}
        proof = kit.prove(pair.contiguous().float(), pair.paged().argmax(-1), subject.dtype)
        seconds = measure.alternate(ways, plan.gather_repeats)
        about = {"rows": count, "context": context, "block_size": size, "bytes": pair.gathered}
        yield {**about, "seconds": seconds, "proof": proof}


def profile(subject: Subject, plan: Sizes) -> Iterator[Group]:
    pair = Pair(subject, max(plan.rows), plan.sized, plan.block_size)
    for name in ("contiguous", "paged"):
        yield kit.profiled(subject, "", getattr(pair, name), most=100) | {"name": name}


# ---- prefixes and preemption --------------------------------------------------------------------


def prefix(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Seconds to a request's first token, with and without a beginning that is cached already."""
    length, numbers = plan.system + plan.own, counting()
    (system,) = subject.prompts([plan.system], "system")
    options: dict[str, Any] = {"max_sequences": 1, "token_budget": length}
    options["block_size"] = plan.block_size
    engines = {on: make(subject.model, 2, prefix_caching=on, **options) for on in (True, False)}

    def first_token(name: str) -> dict[str, Any]:
        engine = engines[name != FRESH_OFF]
        start_cold(engine.scheduler.pool)
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


def preemption(subject: Subject, plan: Sizes) -> Iterator[Group]:
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
        found = kit.by_variant(measure.turns(ways, plan.preemption_repeats))
        yield {"context": context, "rates": rates, **found}


def preempt(subject: Subject, engine: Engine, context: int, steps: int, way: str) -> dict[str, Any]:
    """Seconds to the next token of a request that has just lost its blocks, less those of a plain
    step, and the proof of the answer."""
    scheduler = engine.scheduler
    scheduler.preemption = SWAP if way == SWAP else RECOMPUTE
    scheduler.prefix_caching = way == FOUND
    start_cold(scheduler.pool)
    (prompt,) = subject.prompts([context - steps], "preempted")
    request = engine.add(Request(prompt, kit.greedy(steps + 2)))
    engine.step()
    plain = median(measure.seconds(engine.step) for _ in range(steps))
    others = [scheduler.pool.take() for _ in range(scheduler.pool.available)]
    taken = measure.seconds(engine.step)  # it needs a block and there is none
    if request.state is not State.WAITING:
        raise AssertionError(f"{context} tokens do not fill their blocks: no block was needed")
    for block in others:
        scheduler.pool.give_back(block)
    taken += measure.seconds(engine.step)
    if request.state is not State.FINISHED:
        raise AssertionError("the request was not resumed in the step after it was preempted")
    return {"seconds": taken - plain, "proof": subject.prove([request.output])}


# ---- predictions --------------------------------------------------------------------------------


@cache
def passes(row: Row) -> Watch:
    """What the scheduler of stage 04 or of this stage plans of a row's workload."""
    lengths, budget = row.lengths, row["budget"]
    if row.variant == CONTINUOUS:
        return in_slots(row["slots"], row.config.n_positions, budget, lengths)
    size = row["batch"] if row.variant == PAGED_STATIC else len(lengths)
    whole, *rest = [
        in_blocks(row["blocks"], row["block_size"], budget, lengths[start : start + size])
        for start in range(0, len(lengths), size)
    ]
    for watch in rest:
        whole.passes += watch.passes
        whole.memory = [a + b for a, b in zip(whole.memory, watch.memory, strict=True)]
    return whole


def gathered(row: Row, parts: Sequence[Part]) -> int:
    """Bytes that a pass copies together: the whole blocks of each part but those of whole prompts,
    which need nothing cached."""
    size = row["block_size"]
    blocks = sum(-(-(part.cached + part.count) // size) for part in parts if part.cached)
    return blocks * block_bytes(row.config, row.kind, size)


def pass_seconds(row: Row, parts: Sequence[Part], gathers: bool) -> float:
    """The least seconds for a pass. A gather adds the time of reading what it copies: nothing
    computes meanwhile, and attention then reads the copy from the processor's cache."""
    seconds = row.least([forecast.pass_cost(row.config, row.kind, parts)])
    return seconds + (gathered(row, parts) / row.bandwidth if gathers else 0)


@cache
def pass_times(row: Row) -> list[float]:
    """The least seconds of each pass of a row's engine for its workload."""
    if row.variant not in (OURS, PAGED_STATIC):
        return [row.least([cost]) for cost in forecast.costs(row)]
    return [pass_seconds(row, parts, True) for parts in passes(row).passes]


def least(row: Row) -> float:
    return sum(pass_times(row))


# ---- tables and charts --------------------------------------------------------------------------


def most_rows(row: Row) -> int:
    return max(rows for rows, _ in row["rows"])


def unused(memory: Sequence[int]) -> float:
    """The share of what was reserved that was not used."""
    return 1 - memory[1] / memory[0]


def same_memory(results: Results) -> list[Row]:
    return [group.of(name) for group in results.groups("capacity") for name in (CONTINUOUS, OURS)]


def win(results: Results) -> Row:
    """The winning case in float32."""
    return results.groups("capacity", case=WIN)[0]


CELLS = {
    STATIC: "contiguous, static",
    CONTINUOUS: "contiguous, continuous",
    PAGED_STATIC: "paged, static",
    OURS: "paged, continuous",
}


def memory_lines(results: Results) -> Iterator[dict[str, str]]:
    """By arithmetic: slots of whole contexts, a pool of fixed size, one of just the blocks in
    use."""
    size, config, kind = results.plan["block_size"], PRESETS["gpt2"], torch.float32
    count, prompt, answer = results.plan["table"]
    each = -(-(prompt + answer - 1) // size)  # blocks: the last token is never computed
    block = block_bytes(config, kind, size) / 1e6
    slot = config.n_positions * config.kv_bytes_per_token(kind) / 1e6
    line: dict[str, str] = {}
    for n in results.plan["batches"]:
        here, least = min(n, count // each), n * each * block
        line = {
            "sequences": f"{n}",
            "contiguous, MB": f"{n * slot:,.0f}",
            f"pool of {count:,} blocks, MB": f"{count * block:,.0f}",
            "at once in it": f"{here} ({here * each / count:.0%} of it)",
            "pool of the blocks in use, MB": f"{least:,.0f}",
            "contiguous over that": f"{n * slot / least:.1f}x",
        }
        yield line
    fixed, own = (f"from {n * size // config.n_positions + 1} on" for n in (count, each))
    yield dict(zip(line, ["smaller than contiguous", "", fixed, "", own, ""], strict=True))


def ratio(row: Row) -> str:
    """Paged over contiguous, of the pairs that ran side by side; and as predicted."""
    taken = zip(row["seconds"]["paged"], row["seconds"]["contiguous"], strict=True)
    parts = [Part(number, row["context"], 1) for number in range(row["rows"])]
    slow, fast = (pass_seconds(row, parts, gathers) for gathers in (True, False))
    return f"{summarize([one / other for one, other in taken]).show(2)}, {slow / fast:.2f}"


def few_pairs(results: Results) -> list[Row]:
    """In float32, with the shortest context, one between, and the longest."""
    found = results.groups("gather", dtype="float32", block_size=results.plan["block_size"])
    contexts = sorted({row["context"] for row in found})
    return [row for row in found if row["context"] in contexts[:: len(contexts) // 2]]


def first_token_limit(row: Row) -> float:
    """Least seconds to the first token, with what the prefix cache holds."""
    system = row["system"]
    cached, new = (system, row["own"]) if row.variant == HIT else (0, system + row["own"])
    return pass_seconds(row, [Part(0, cached, new)], True)


def preemption_lines(results: Results) -> Iterator[dict[str, str]]:
    """Both ways of a preemption, as measured and by what the scheduler goes by."""
    for row in results.groups("preemption"):
        context, cost = row["context"], Cost(row.config, row.kind, **row["rates"])
        predicted = {RECOMPUTE: cost.recompute(context), SWAP: cost.swap(context)}
        measured = {way: row.of(way).median for way in predicted}
        best, expected = (min(costs, key=costs.__getitem__) for costs in (measured, predicted))
        line = {"model": row["model"], "context": context}
        for way, seconds in predicted.items():
            line[f"{way}, predicted, ms"] = f"{row.of(way).ms}, {seconds * 1e3:.1f}"
        yield line | {
            "cheaper (predicted)": f"{best} ({expected})",
            "recompute with own blocks cached, ms": row.of(FOUND).ms,
            "computes at, GFLOP/s": f"{cost.flops / 1e9:,.0f}",
            "copies at, GB/s": f"{cost.bandwidth / 1e9:.1f}",
            "tokens proved": row.of(FOUND).proof,
        }


def parts_of(operators: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each part of a pass."""
    parts = dict.fromkeys(("gather", "attention", "linear layers", "rest"), 0.0)
    for one in operators:
        part = "gather" if one["operator"] == "index_select" else one["kind"]
        part = part if part in parts else "linear layers" if one["product"] else "rest"
        parts[part] += one["seconds"] * 1e3
    return parts


def parts_lines(results: Results) -> Iterator[dict[str, str]]:
    """Milliseconds and shares of the parts of a pass, contiguous and paged."""
    found = {row["name"]: parts_of(row["operators"]) for row in results.groups("profile")}
    for part in found["paged"]:
        line = {"part of a decode step": part}
        for name, parts in found.items():
            line[f"{name}, ms"] = f"{parts[part]:.1f}"
            line[f"share, {name}"] = f"{parts[part] / sum(parts.values()):.0%}"
        yield line


COLUMNS: dict[str, rows.Column] = {
    "workload": lambda row: f"{row.requests}, {row['case']}",
    "steps (predicted)": lambda row: f"{row['passes']:,} ({len(pass_times(row)):,})",
    "over stage 04 (predicted)": rows.gain(CONTINUOUS, least),
    "over stage 03 (predicted)": rows.gain(STATIC, least),
    "over stage 02 (predicted)": rows.gain(SINGLE, least),
    "same tokens": lambda row: (
        row.alike(CONTINUOUS, "stage 04") if "case" in row.group else row.proof
    ),
    **rows.limits_of(least),
    "most at once": most_rows,
    "mean while others wait": "crowded:.1f",
    "mean at once": lambda row: f"{row['busy'] / row['passes']:.1f}",
    "memory unused": lambda row: f"{unused(row.get('memory') or passes(row).memory):.1%}",
    "cache, batches": lambda row: CELLS[row.variant],
    "memory is taken": "name",
    "sequences": "rows",
    "block size": "block_size",
    "paged over contiguous, predicted": ratio,
    "gathered, MB": lambda row: f"{row['bytes'] / 1e6:,.0f}",
    "at full bandwidth, ms": lambda row: f"{row['bytes'] / row.bandwidth * 1e3:.1f}",
    "prefix": "variant",
    "TTFT, limit, ms": lambda row: f"{row.ms}, {first_token_limit(row) * 1e3:.1f}",
    "tokens computed": lambda row: f"{median(row['computed']):,.0f}",
    "found in the cache": lambda row: (
        f"{1 - median(row['computed']) / (row['system'] + row['own']):.0%}"
    ),
    "over the first (predicted)": rows.gain(MISS, first_token_limit),
}
TABLES = rows.tables(
    COLUMNS,
    """
    capacity < same_memory: workload | engine | tok/s | steps (predicted)
      | over stage 04 (predicted) | same tokens
    capacity_memory < same_memory: workload | engine | most at once | mean while others wait
      | mean at once | preemptions | memory unused | cache, MB | seconds, limit
    grid: cache, batches | mean at once | steps (predicted) | tok/s | over stage 03 (predicted)
      | same tokens
    lose < single: dtype | prompt | answer | engine | tok/s | limit, tok/s
      | over stage 02 (predicted) | same tokens
    waste: memory is taken | memory unused
    gather < few_pairs: sequences | context | contiguous, ms | paged, ms
      | paged over contiguous, predicted | gathered, MB
    gather_all < gather: dtype | sequences | context | block size | contiguous, ms | paged, ms
      | paged over contiguous, predicted | gathered, MB | at full bandwidth, ms | same tokens
    prefix: model | prefix | TTFT, limit, ms | tokens computed | found in the cache
      | over the first (predicted) | same tokens
    """,
    same_memory=same_memory,
    grid=lambda results: [win(results).of(name) for name in CELLS],
    memory=memory_lines,
    few_pairs=few_pairs,
    prefix=lambda results: results.rows("prefix"),
    preemption=preemption_lines,
    parts=parts_lines,
    profile=lambda results: rows.operators(results).split("\n\n")[-1],
)


def capacity_chart(results: Results) -> Figure:
    """Sequences in each pass of the winning case, contiguous and paged."""
    group, bands = win(results), {}
    most = most_rows(group.of(OURS))
    for row in (group.of(CONTINUOUS), group.of(OURS)):
        mean = f"{row['busy'] / row['passes']:.1f} on average"
        words = f"{row.variant}: {row['passes']:,} steps, up to {most_rows(row)} sequences, {mean}"
        bands[words] = (row["rows"], most)
    title = f"In the memory of {group['slots']} whole contexts, up to {most} sequences"
    return charts.bands(title, "step", "sequences in it", bands)


def blocks_chart(results: Results) -> Figure:
    blocks = [
        [state for state, n in runs for _ in range(n)] for runs in results["block_map"][0]["blocks"]
    ]
    title = f"Freed blocks go on to the next sequence (the first {DRAWN} of {len(blocks)} blocks)"
    return picture([list(frame[:DRAWN]) for frame in zip(*blocks, strict=True)], title)


def headline(results: Results) -> str:
    group = win(results)
    ours, base = group.of(OURS), group.of(CONTINUOUS)
    return (
        f"in the memory of {group['slots']} slots, {ours['crowded']:.0f} sequences at once while "
        f"others wait, and {base.median / ours.median:.1f}x the tok/s (GPT-2 124M shape, "
        f"{group['dtype']})"
    )


ABOUT = "Measures paged memory on this CPU, beside the stages before."
WORK = kit.cases(
    Case(single),
    Case(gather),
    *(Case(one, dtypes=1) for one in (capacity, profile, block_map, waste)),
    *(Case(one, models=None, dtypes=1) for one in (prefix, preemption)),
)
CHARTS = {
    "capacity": capacity_chart,
    "waste": rows.bars(
        "Small blocks leave hardly any memory unused",
        ("% of the reserved memory that holds nothing, over all steps",),
        "waste",
        "name",
        {"unused": lambda row: 100 * unused(row["memory"])},
    ),
    "blocks": blocks_chart,
}
BENCHMARK = kit.Benchmark("stage05_paged", ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
