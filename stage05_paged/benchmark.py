"""What memory in blocks buys, where it buys nothing, and what it costs:
`python -m stage05_paged.benchmark`.

Stages 02 to 04 and this one run in turn, and where it matters in the same memory for keys and
values. Every answer is proved; the judge of a single pass is the contiguous cache.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch.nn.functional import pad
from tqdm import tqdm

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.forecast import Part, Watch, pass_cost, simulate, static_costs
from shared.bench.kit import Case, Group, Lengths, Subject
from shared.bench.rows import Results, Row, median
from shared.checkpoint import PRESETS, Config
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
from .memory import Cost, block_bytes, free_memory, make_pool, measure_cost, most_sequences
from .scheduler import Counts, Scheduler

SINGLE, STATIC = "stage 02, one request", "stage 03, static"
CONTINUOUS, OURS = "stage 04, continuous", "stage 05, paged"
PAGED_STATIC = "stage 05, in static batches"
WIN, NULL = "answers of unlike lengths", "all at full length"
MISS, HIT = "shared, first request", "shared, later ones"
FRESH_ON, FRESH_OFF = "none shared, caching on", "none shared, caching off"
RECOMPUTE, SWAP, FOUND = "recompute", "swap", "recompute, own blocks cached"
DRAWN = 48  # blocks on the map: more would be thinner than a letter


@dataclass(frozen=True)
class Sizes(kit.Plan):
    """A budget is that of a pass, in tokens."""

    models: tuple[str, ...] = ("gpt2", "stories")
    # The same memory for all, in tokens. A contiguous engine makes slots of whole contexts of it.
    memory: int = 4096
    block_size: int = 16
    budget: int = 256
    # Win: answers of very different lengths, nearly all much shorter than the context.
    requests: int = 72
    prompts: tuple[int, int] = (16, 64)
    answers: tuple[int, int] = (8, 256)
    middle: int = 48
    repeats: tuple[int, int] = (2, 1)  # of this stage, of the others
    # Null: every request fills a whole context.
    null: tuple[int, int, int] = (6, 960, 64)  # requests, prompt, answer
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
    preempted: tuple[int, ...] = (32, 128, 512, 960)  # lengths
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
    """An engine whose every call starts with an empty prefix cache, and whose memory is watched.

    batch: at most this many prompts at a time, the next ones when the last of them has ended, as a
    static engine takes them; 0: all.
    """

    def __init__(self, engine: Any, reserved: Callable[[], int], batch: int = 0) -> None:
        self.engine, self.batch, self.runner = engine, batch, engine.runner
        self.watch = Watch(engine.scheduler, reserved)
        engine.observers.append(self.watch)
        self.steps: list[Any] = []

    def generate(self, prompts: list[list[int]], sampling: Sequence[Any]) -> list[Output]:
        if isinstance(self.engine.scheduler, Scheduler):
            start_cold(self.engine.scheduler.pool)
        self.watch.memory, self.steps, outputs = [0, 0], [], []
        size = self.batch or len(prompts)
        for at in range(0, len(prompts), size):
            outputs += self.engine.generate(prompts[at : at + size], sampling[at : at + size])
            self.steps += self.engine.steps
        return outputs


def slots(plan: Sizes, config: Config) -> int:
    """Whole contexts that the memory has room for."""
    return plan.memory // config.n_positions


def paged(subject: Subject, plan: Sizes, budget: int, batch: int = 0) -> Cold:
    dtype, config = subject.dtype, subject.config
    pool = make_pool(plan.memory * config.kv_bytes_per_token(dtype), config, dtype, plan.block_size)
    most = min(pool.count, budget)
    engine = make(subject.model, pool=pool, max_sequences=most, token_budget=budget)
    return Cold(engine, partial(owned, pool), batch)


def owned(pool: BlockPool) -> int:
    """Tokens that memory is taken for."""
    return pool.owned * pool.block_size


def contiguous(subject: Subject, plan: Sizes, budget: int) -> Cold:
    scheduler = SlotScheduler(slots(plan, subject.config), budget)
    context = subject.config.n_positions
    engine = make_slots(subject.model, scheduler=scheduler)
    return Cold(engine, lambda: len(scheduler.running) * context)


def capacity(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Workloads in the same memory, contiguous and paged; the winning one in static batches too."""
    requests, prompt, answer = plan.null
    full: Lengths = [(prompt, answer)] * requests
    for case, lengths in ((WIN, workload(plan)), (NULL, full)):
        ours = paged(subject, plan, plan.budget)
        mean = math.ceil(sum(map(sum, lengths)) / len(lengths))
        batch = most_sequences(ours.engine.scheduler.pool, mean)
        engines: dict[str, Any] = {CONTINUOUS: contiguous(subject, plan, plan.budget), OURS: ours}
        repeats = dict.fromkeys(engines, plan.null_repeats)
        if case == WIN:
            size = slots(plan, subject.config)
            engines[STATIC] = StaticEngine(subject.model, max_batch=size)
            engines[PAGED_STATIC] = paged(subject, plan, plan.budget, batch)
            repeats = {name: plan.repeats[name != OURS] for name in engines}
        group, runs = kit.compare(
            subject, engines, lengths, repeats, case=case, **about(ours, plan)
        )
        watched = {name: each for name, each in engines.items() if isinstance(each, Cold)}
        yield group | {
            "batch": batch,
            "slots": slots(plan, subject.config),
            "memory": {name: each.watch.memory for name, each in watched.items()},
            "crowded": {name: crowded(runs[name].steps[-1]) for name in watched},
            "preemptions": {
                name: sum(getattr(step, "preempted", 0) for step in runs[name].steps[-1])
                for name in watched
            },
        }


def about(ours: Cold, plan: Sizes) -> dict[str, Any]:
    pool = ours.engine.scheduler.pool
    return {"budget": plan.budget, "blocks": pool.count, "block_size": pool.block_size}


def crowded(steps: Sequence[Any]) -> float:
    """Sequences in a pass, on average over those after which others still waited."""
    crowds = [step.rows for step in steps if step.waiting]
    return sum(crowds) / len(crowds) if crowds else 0.0


def single(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A single request on the engines of three stages, each of which runs its prompt whole."""
    for lengths in plan.singles:
        budget = max(plan.budget, lengths[0])
        ours = paged(subject, plan, budget)
        engines = {
            SINGLE: SingleEngine(subject.model),
            CONTINUOUS: contiguous(subject, plan, budget),
            OURS: ours,
        }
        fields = about(ours, plan) | {"budget": budget, "slots": slots(plan, subject.config)}
        yield kit.compare(subject, engines, [lengths], plan.single_repeats, "single", **fields)[0]


def waste(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Tokens reserved and used in the winning case with memory for all requests: by the schedulers
    alone, without a model."""
    context, lengths = subject.config.n_positions, workload(plan)
    for name, exact in (("whole context", False), ("exact length known", True)):
        slotted = SlotScheduler(plan.requests, plan.budget)
        reserved = partial(slot_tokens, slotted, None if exact else context)
        memory = simulate(slotted, lengths, reserved).memory
        yield {**subject.about, "name": f"contiguous, {name}", "memory": memory}
    for size in plan.sizes:
        pool = BlockPool(plan.requests * -(-context // size), size)
        scheduler = Scheduler(pool, min(pool.count, plan.budget), plan.budget)
        memory = simulate(scheduler, lengths, partial(owned, pool)).memory
        yield {**subject.about, "name": f"paged, blocks of {size}", "memory": memory}


def slot_tokens(scheduler: SlotScheduler, size: int | None) -> int:
    """Tokens that the slots in use have room for; None: each for just its request."""
    if size is not None:
        return len(scheduler.running) * size
    running = scheduler.running
    return sum(len(one.prompt_ids) + one.sampling.max_tokens - 1 for one in running)


def block_map(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """What each block held after each of the first passes of the winning case: [state, passes]
    pairs, a list a block."""
    engine = paged(subject, plan, plan.budget).engine
    lengths = workload(plan)
    prompts = subject.prompts(prompt for prompt, _ in lengths)
    for prompt, (_, answer) in zip(prompts, lengths, strict=True):
        engine.add(Request(prompt, kit.greedy(answer)))
    frames: list[list[int]] = []
    while len(frames) < plan.frames and engine.requests:
        engine.step()
        frames.append(blockmap(engine.scheduler))
    yield {
        **subject.about,
        "blocks": [kit.run_lengths(states) for states in zip(*frames, strict=True)],
    }


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
            tqdm.write(
                f"note: {count} sequences of {context} tokens take {needed / 1e9:.1f} GB in two "
                "caches: left out"
            )
            continue
        pair = Pair(subject, count, context, size)
        proof = kit.prove(pair.contiguous().float(), pair.paged().argmax(-1), subject.dtype)
        ways = {"contiguous": pair.contiguous, "paged": pair.paged}
        fields = {"rows": count, "context": context, "block_size": size, "bytes": pair.gathered}
        seconds = measure.alternate(ways, plan.gather_repeats)
        yield {**subject.about, **fields, "seconds": seconds, "proof": proof}


def profile(subject: Subject, plan: Sizes) -> Iterator[Group]:
    pair = Pair(subject, max(plan.rows), plan.sized, plan.block_size)
    for name, run in (("contiguous", pair.contiguous), ("paged", pair.paged)):
        yield kit.profiled(subject, "", run, most=100) | {"name": name}


# ---- prefixes and preemption --------------------------------------------------------------------


def prefix(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Seconds to a request's first token, with and without a beginning that is cached already."""
    length = plan.system + plan.own
    (system,) = subject.prompts([plan.system], "system")
    blocks = 4 * -(-length // plan.block_size)
    options: dict[str, Any] = {"max_sequences": 1, "token_budget": length}
    engines = {}
    for on in (True, False):
        pool = BlockPool(blocks, plan.block_size)
        engines[on] = make(subject.model, pool=pool, prefix_caching=on, **options)
    numbers = iter(range(10**6))

    def first_token(name: str) -> dict[str, Any]:
        engine = engines[name != FRESH_OFF]
        start_cold(engine.scheduler.pool)
        if name == HIT:
            engine.generate([system + subject.prompts([plan.own], "earlier")[0]], kit.greedy(1))
        shared = name in (MISS, HIT)
        rest = subject.prompts([plan.own if shared else length], f"{name} {next(numbers)}")[0]
        request = Request(system + rest if shared else rest, kit.greedy(2))
        engine.steps.clear()
        engine.scheduler.counts = Counts()
        started = time.perf_counter()
        engine.add(request)
        while not request.output.token_ids:
            engine.step()
        taken = time.perf_counter() - started
        for _ in engine.run():
            pass
        computed = sum(step.prefill_tokens for step in engine.steps)
        rate, proof = engine.scheduler.counts.hit_rate, subject.prove([request.output])
        return {"seconds": taken, "computed": computed, "hit_rate": rate, "proof": proof}

    names = [MISS, HIT, FRESH_ON, FRESH_OFF]
    found = measure.turns({name: partial(first_token, name) for name in names}, plan.prefix_repeats)
    about = {"system": plan.system, "own": plan.own, "block_size": plan.block_size}
    proofs = {name: [run.pop("proof") for run in runs][-1] for name, runs in found.items()}
    yield {**subject.about, **about, **kit.by_variant(found), "proof": proofs}


def preemption(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """What it costs a request to lose its memory, at several lengths: seconds to its next token,
    less those of a plain step."""
    most = max(plan.preempted) + plan.plain_steps + 1
    blocks = 2 * -(-most // plan.block_size)
    pool, swap_pool = (BlockPool(blocks, plan.block_size) for _ in range(2))
    options: dict[str, Any] = {"max_sequences": 1, "token_budget": most, "preemption": SWAP}
    engine = make(subject.model, pool=pool, swap_pool=swap_pool, **options)
    cost = measure_cost(engine.runner, pool, swap_pool, subject.dtype)
    rates = {"flops": cost.flops, "bandwidth": cost.bandwidth, "overhead": cost.overhead}
    for context in plan.preempted:
        ways = {
            way: partial(preempt, subject, engine, context, plan.plain_steps, way)
            for way in (RECOMPUTE, SWAP, FOUND)
        }
        found = measure.turns(ways, plan.preemption_repeats)
        seconds = {way: [taken for taken, _ in runs] for way, runs in found.items()}
        proofs = {way: runs[-1][1] for way, runs in found.items()}
        about = {"context": context, "rates": rates}
        yield {**subject.about, **about, "seconds": seconds, "proof": proofs}


def preempt(
    subject: Subject, engine: Engine, context: int, steps: int, way: str
) -> tuple[float, dict[str, Any]]:
    """Seconds that a preemption costs when `context` tokens have filled their blocks, and the
    proof of the answer."""
    scheduler = engine.scheduler
    scheduler.preemption = SWAP if way == SWAP else RECOMPUTE
    scheduler.prefix_caching = way == FOUND
    start_cold(scheduler.pool)
    (prompt,) = subject.prompts([context - steps], "preempted")
    request = engine.add(Request(prompt, kit.greedy(steps + 2)))
    engine.step()
    plain = [measure.seconds(engine.step) for _ in range(steps)]
    others = [scheduler.pool.take() for _ in range(scheduler.pool.available)]
    taken = measure.seconds(engine.step)  # it needs a block and there is none
    if request.state is not State.WAITING:
        raise AssertionError(f"{context} tokens do not fill their blocks: no block was needed")
    for block in others:
        scheduler.pool.give_back(block)
    taken += measure.seconds(engine.step)
    if request.state is not State.FINISHED:
        raise AssertionError("the request was not resumed in the step after it was preempted")
    return taken - median(plain), subject.prove([request.output])


# ---- predictions --------------------------------------------------------------------------------


def passes(row: Row) -> Watch:
    """What the scheduler of stage 04 or of this stage plans of a row's workload."""
    lengths, budget = row.lengths, row["budget"]
    if row.variant == CONTINUOUS:
        slots = SlotScheduler(row["slots"], budget)
        return simulate(slots, lengths, partial(slot_tokens, slots, row.config.n_positions))
    size = row["batch"] if row.variant == PAGED_STATIC else len(lengths)
    found = []
    for start in range(0, len(lengths), size):
        pool = BlockPool(row["blocks"], row["block_size"])
        scheduler = Scheduler(pool, min(pool.count, budget), budget)
        found.append(simulate(scheduler, lengths[start : start + size], partial(owned, pool)))
    whole = found[0]
    for watch in found[1:]:
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
    seconds = row.least([pass_cost(row.config, row.kind, parts)])
    return seconds + (gathered(row, parts) / row.bandwidth if gathers else 0)


@cache
def forecast(row: Row) -> tuple[int, float]:
    """Passes of a row's engine for its workload, and the least seconds for them."""
    if row.variant in (SINGLE, STATIC):
        size = row["slots"] if row.variant == STATIC else 1
        costs = static_costs(row.config, row.kind, row.lengths, size)
        return len(costs), row.least(costs)
    planned = passes(row).passes
    gathers = row.variant != CONTINUOUS
    return len(planned), sum(pass_seconds(row, parts, gathers) for parts in planned)


def least(row: Row) -> float:
    return forecast(row)[1]


# ---- tables and charts --------------------------------------------------------------------------


def mean_rows(row: Row) -> float:
    return row["busy"] / row["passes"]


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


def crossover(blocks: int, size: int, context: int) -> int:
    """The least number of slots that take more memory than a pool."""
    return blocks * size // context + 1


def memory_lines(results: Results) -> Iterator[dict[str, str]]:
    """By arithmetic: slots of whole contexts, a pool of fixed size, one of just the blocks in
    use."""
    size, config, kind = results.plan["block_size"], PRESETS["gpt2"], torch.float32
    count, prompt, answer = results.plan["table"]
    pool, one = BlockPool(count, size), block_bytes(config, kind, size) / 1e6
    tokens = prompt + answer - 1  # the last token of an answer is never computed
    each, most = pool.blocks_for(tokens), most_sequences(pool, tokens)
    slot = config.n_positions * config.kv_bytes_per_token(kind) / 1e6
    headings = ["sequences", "contiguous, MB", f"pool of {count:,} blocks, MB", "at once in it"]
    headings += ("pool of the blocks in use, MB", "contiguous over that")
    for n in results.plan["batches"]:
        here, least = min(n, most), n * each * one
        cells = [f"{n}", f"{n * slot:,.0f}", f"{count * one:,.0f}"]
        cells += [
            f"{here} ({here * each / count:.0%} of it)",
            f"{least:,.0f}",
            f"{n * slot / least:.1f}x",
        ]
        yield dict(zip(headings, cells, strict=True))
    fixed, own = (f"from {crossover(n, size, config.n_positions)} on" for n in (count, each))
    last = ["smaller than contiguous", "", fixed, "", own, ""]
    yield dict(zip(headings, last, strict=True))


def ratio(row: Row) -> str:
    """Paged over contiguous, of the pairs that ran side by side; and as predicted."""
    taken = zip(row["seconds"]["paged"], row["seconds"]["contiguous"], strict=True)
    parts = [Part(number, row["context"], 1) for number in range(row["rows"])]
    slow, fast = (pass_seconds(row, parts, gathers) for gathers in (True, False))
    return f"{summarize([one / other for one, other in taken]).show(2)}, {slow / fast:.2f}"


def few_pairs(results: Results) -> list[Row]:
    """In float32, with the shortest context, one between, and the longest."""
    found = results.groups("gather", dtype="float32", block_size=results.plan["block_size"])
    wanted = sorted({row["context"] for row in found})
    shown = {wanted[0], wanted[len(wanted) // 2], wanted[-1]}
    return [row for row in found if row["context"] in shown]


def first_token_limit(row: Row) -> float:
    """Least seconds to the first token, with what the prefix cache holds."""
    system = row["system"]
    cached, new = (system, row["own"]) if row.variant == HIT else (0, system + row["own"])
    return pass_seconds(row, [Part(0, cached, new)], True)


def ways(row: Row) -> dict[str, tuple[float, float]]:
    """Seconds of both ways of a preemption: measured and predicted."""
    cost = Cost(row.config, row.kind, **row["rates"])
    predicted = {RECOMPUTE: cost.recompute, SWAP: cost.swap}
    return {name: (row.of(name).median, of(row["context"])) for name, of in predicted.items()}


def way(name: str) -> rows.Column:
    return lambda row: f"{row.of(name).ms}, {ways(row)[name][1] * 1e3:.1f}"


def cheaper(row: Row) -> str:
    costs = ways(row)
    best, predicted = (min(costs, key=lambda name: costs[name][at]) for at in (0, 1))
    return f"{best} ({predicted})"


def parts_of(operators: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each part of a pass."""
    parts = dict.fromkeys(("gather", "attention", "linear layers", "rest"), 0.0)
    for one in operators:
        part = "gather" if one["operator"] == "index_select" else one["kind"]
        part = part if part in parts else "linear layers" if one["product"] else "rest"
        parts[part] += one["seconds"] * 1e3
    return parts


def parts_lines(results: Results) -> list[dict[str, str]]:
    """Milliseconds and shares of the parts of a pass, contiguous and paged."""
    found = {row["name"]: parts_of(row["operators"]) for row in results.groups("profile")}

    def cells(part: str) -> dict[str, str]:
        line = {"part of a decode step": part}
        for name, parts in found.items():
            line |= {f"{name}, ms": f"{parts[part]:.1f}"}
            line |= {f"share, {name}": f"{parts[part] / sum(parts.values()):.0%}"}
        return line

    return [cells(part) for part in found["paged"]]


COLUMNS: dict[str, rows.Column] = {
    "workload": lambda row: f"{row.requests}, {row['case']}",
    "steps (predicted)": lambda row: f"{row['passes']:,} ({forecast(row)[0]:,})",
    "over stage 04 (predicted)": rows.gain(CONTINUOUS, least),
    "over stage 03 (predicted)": rows.gain(STATIC, least),
    "over stage 02 (predicted)": rows.gain(SINGLE, least),
    "same tokens": lambda row: (
        row.alike(CONTINUOUS, "stage 04") if "case" in row.group else row.proof
    ),
    "seconds, limit": lambda row: f"{summarize(row['seconds']).show(2)}, {least(row):.2f}",
    "limit, tok/s": lambda row: f"{row.tokens / least(row):,.1f}",
    "most at once": most_rows,
    "mean while others wait": lambda row: f"{row['crowded']:.1f}",
    "mean at once": lambda row: f"{mean_rows(row):.1f}",
    "memory unused": lambda row: f"{unused(row['memory']):.1%}",
    "cache, batches": lambda row: CELLS[row.variant],
    "prompt": lambda row: row.lengths[0][0],
    "answer": "tokens",
    "memory is taken": "name",
    "sequences": "rows",
    "context": "context:,",
    "block size": "block_size",
    "paged over contiguous, predicted": ratio,
    "gathered, MB": lambda row: f"{row['bytes'] / 1e6:,.0f}",
    "at full bandwidth, ms": lambda row: f"{row['bytes'] / row.bandwidth * 1e3:.1f}",
    "prefix": "variant",
    "TTFT, limit, ms": lambda row: f"{row.ms}, {first_token_limit(row) * 1e3:.1f}",
    "tokens computed": lambda row: f"{median(row['computed']):,.0f}",
    "found in the cache": lambda row: f"{median(row['hit_rate']):.0%}",
    "over the first (predicted)": rows.gain(MISS, first_token_limit),
    "recompute, predicted, ms": way(RECOMPUTE),
    "swap, predicted, ms": way(SWAP),
    "cheaper (predicted)": cheaper,
    "computes at, GFLOP/s": lambda row: f"{row['rates']['flops'] / 1e9:,.0f}",
    "copies at, GB/s": lambda row: f"{row['rates']['bandwidth'] / 1e9:.1f}",
    "recompute with own blocks cached, ms": lambda row: row.of(FOUND).ms,
    "tokens proved": lambda row: row.of(FOUND).proof,
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
    preemption: model | context | recompute, predicted, ms | swap, predicted, ms
      | cheaper (predicted) | recompute with own blocks cached, ms | computes at, GFLOP/s
      | copies at, GB/s | tokens proved
    """,
    same_memory=same_memory,
    grid=lambda results: [win(results).of(name) for name in CELLS],
    memory=memory_lines,
    few_pairs=few_pairs,
    prefix=lambda results: results.rows("prefix"),
    parts=parts_lines,
    profile=lambda results: rows.operators(results).split("\n\n")[-1],
)


def capacity_chart(results: Results) -> Figure:
    """Sequences in each pass of the winning case, contiguous and paged."""
    group = win(results)
    ours, base = group.of(OURS), group.of(CONTINUOUS)
    title = f"In the memory of {group['slots']} whole contexts, up to {most_rows(ours)} sequences"
    figure, axes = charts.new_figure(title, "forward pass", "sequences in it")
    with matplotlib.rc_context(charts.style()):
        for row, colour in ((ours, charts.COLOURS[3]), (base, charts.COLOURS[0])):
            used = [count for count, _ in row["rows"]]
            edges = [0, *accumulate(times for _, times in row["rows"])]
            axes.fill_between(edges, [*used, used[-1]], step="post", facecolor=colour, linewidth=0)
            words = (
                f"{row.variant}:\n{edges[-1]:,} steps, {mean_rows(row):.1f} sequences on average"
            )
            half, side = (2, "left") if row is ours else (1, "right")
            place = (edges[-1] / half, most_rows(row) / half)
            axes.annotate(words, place, (0, 6), textcoords="offset points", ha=side, fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    return figure


def waste_chart(results: Results) -> Figure:
    found = results.groups("waste")
    title = "Small blocks leave hardly any memory unused"
    x = "% of the reserved memory that holds nothing, over all steps"
    series = {"unused": [100 * unused(row["memory"]) for row in found]}
    return charts.bars(title, x, [row["name"] for row in found], series)


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
ONCE = (capacity, profile, block_map, waste)
BOTH = (prefix, preemption)  # models
WORK = kit.cases(
    Case(single),
    Case(gather),
    *(Case(one, dtypes=1) for one in ONCE),
    *(Case(one, models=None, dtypes=1) for one in BOTH),
)
CHARTS = {"capacity": capacity_chart, "waste": waste_chart, "blocks": blocks_chart}
BENCHMARK = kit.Benchmark("stage05_paged", ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
