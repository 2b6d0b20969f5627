"""What memory in blocks buys, where it buys nothing, and what it costs: `python -m stage05_paged.benchmark`.

Writes reports/<machine>/stage05_paged.json; `python -m shared.bench.report` turns it into tables and charts. Stages 02 to 04 and this
one run in turn on the same weights, dtype, threads and prompts, each answer with the same number of tokens, and where it
matters in the same memory for keys and values.

Every answer is proved: one pass over prompt and answer alone, without cache or neighbours, must choose the same tokens. Of a
single pass the contiguous cache is the judge. Nothing is written if a token differs.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import matplotlib
import torch
from torch.nn.functional import pad
from tqdm import tqdm

from shared import charts as draw
from shared import checkpoint, cli, measure
from shared.bench import benchmarks, profile
from shared.bench.tables import label, limits_of, limits_table, median, milliseconds, profile_table
from shared.parity import near_tie, random_prompt
from stage01_forward.generation import Output, Sampling, sampling_per_prompt
from stage01_forward.model import GPT2
from stage02_kv_cache.benchmark import greedy, proof_text, shape_of
from stage02_kv_cache.engine import Engine as SingleEngine
from stage03_batching import benchmark as static_benchmark
from stage03_batching.benchmark import Subject
from stage03_batching.engine import Engine as StaticEngine
from stage04_continuous import benchmark as continuous_benchmark
from stage04_continuous.benchmark import (
    SINGLE,
    STATIC,
    Lengths,
    Part,
    Runs,
    in_turn,
    pass_cost,
    run_lengths,
    tokens_of,
)
from stage04_continuous.cache import SlotCache
from stage04_continuous.engine import Engine as SlotEngine
from stage04_continuous.engine import SlotsRecord
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import Scheduler as SlotScheduler

from .blockmap import blockmap, picture
from .blocks import BlockPool
from .cache import PagedCache
from .engine import BlocksRecord, Engine
from .memory import Cost, block_bytes, free_memory, make_pool, most_sequences
from .scheduler import Counts, Scheduler

STAGE = "stage05_paged"
CONTINUOUS = continuous_benchmark.OURS
PAGED_STATIC, OURS = "stage 05, in static batches", "stage 05, paged"
WIN, NULL = "answers of unlike lengths", "all at full length"
MISS, HIT = "shared, first request", "shared, later ones"
FRESH_ON, FRESH_OFF = "none shared, caching on", "none shared, caching off"
DRAWN = 48  # blocks on the map: more would be thinner than a letter
RECOMPUTE, SWAP, FOUND = "recompute", "swap", "recompute, own blocks cached"  # ways of a preemption


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often. Lengths are in tokens; a budget is that of a pass."""

    model: str = "gpt2"
    small: str = "stories"
    # The same memory for all: of so many tokens. A contiguous engine makes slots of whole contexts of it.
    budget_tokens: int = 4096
    block_size: int = 16
    budget: int = 256
    # Win: answers of very different lengths, nearly all much shorter than the context. It is the winning case of stage 04.
    win_dtypes: tuple[str, ...] = ("float32",)
    requests: int = 96
    prompts: tuple[int, int] = (16, 64)
    answers: tuple[int, int] = (8, 512)
    middle: int = 66
    win_repeats: int = 2
    static_repeats: int = 1  # of the two engines that run the same in static batches, in float32
    # Null: every request fills a whole context.
    null_requests: int = 8
    null_prompt: int = 960
    null_answer: int = 64
    null_repeats: int = 2
    # Lose: one request, and the gather.
    singles: tuple[tuple[int, int], ...] = ((64, 64), (900, 32))
    single_repeats: int = 3
    rows: tuple[int, ...] = (1, 32)
    contexts: tuple[int, ...] = (64, 128, 256, 512, 1008)
    sized_context: int = 256  # of the most rows, where the block size is varied, and in the profile
    gather_repeats: int = 7
    # Memory that is reserved and not used.
    sizes: tuple[int, ...] = (1, 8, 16, 32, 128)
    # The reference's table: memory against batch.
    batches: tuple[int, ...] = (1, 8, 32, 128, 256, 512)
    table_blocks: int = 1900
    table_prompt: int = 16
    table_answer: int = 50
    # A system prompt that all requests have in common, and what each has of its own.
    system: int = 512
    own: int = 32
    prefix_repeats: int = 5
    # A single request loses its memory at this length.
    preempted: tuple[int, ...] = (32, 128, 512, 960)
    plain_steps: int = 3
    preemption_repeats: int = 3
    # Passes of the winning run that are drawn as a map of the blocks.
    frames: int = 150

    @property
    def slots(self) -> int:
        """Whole contexts that the memory has room for."""
        return self.budget_tokens // shape_of(self.model).n_positions

    @property
    def lengths(self) -> Lengths:
        """The requests of the winning case, drawn as in stage 04."""
        like = {
            "requests": self.requests,
            "prompts": self.prompts,
            "answers": self.answers,
            "middle": self.middle,
        }
        return continuous_benchmark.workload(continuous_benchmark.Plan(**like))  # type: ignore[arg-type]

    @property
    def runs(self) -> int:
        """How many steps the progress bar has: timed runs, pairs of caches, and the map."""
        capacity = 2 * (
            len(self.win_dtypes) * self.win_repeats + self.static_repeats + self.null_repeats
        )
        both = len(self.rows) * len(self.contexts) + 3 * len(self.singles) * self.single_repeats
        models = 4 * self.prefix_repeats + 3 * self.preemption_repeats * len(self.preempted)
        return capacity + 2 * both + len(self.sizes) + 2 * models + 1


FULL = Plan()
QUICK = Plan(
    budget_tokens=2048, requests=12, answers=(4, 64), middle=24, win_repeats=1,
    null_requests=3, null_prompt=1016, null_answer=8, null_repeats=1, singles=((64, 16),), single_repeats=2,
    rows=(32,), contexts=(64, 256), gather_repeats=3, sizes=(1, 16), prefix_repeats=1,
    preempted=(32, 512), preemption_repeats=1, frames=40,
)  # fmt: skip


# ---- measuring: the same memory -----------------------------------------------------------------------------------------


def start_cold(pool: BlockPool) -> None:
    """Evict all cached blocks of a pool of which none is owned, so that nothing of earlier requests can be found."""
    for block in reversed(
        [pool.take() for _ in range(pool.count)]
    ):  # so the next request takes the same blocks again
        pool.give_back(block)


class Paged:
    """This stage's engine, whose every call of `generate` starts cold: a repeat must not find what the last one has left.

    batch: so many prompts at a time, the next ones when the last of them has ended, as a static engine takes them; 0: all.
    """

    def __init__(self, model: GPT2, pool: BlockPool, budget: int, batch: int = 0) -> None:
        self.engine = Engine(model, scheduler=Scheduler(pool, min(pool.count, budget), budget))
        self.batch = batch
        self.steps: list[BlocksRecord] = []  # of the last call

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Output]:
        params, size = sampling_per_prompt(prompts, sampling), self.batch or len(prompts)
        start_cold(self.engine.scheduler.pool)
        self.steps = []
        outputs = []
        for first in range(0, len(prompts), size):
            outputs += self.engine.generate(
                prompts[first : first + size], params[first : first + size]
            )
            self.steps += self.engine.steps
        return outputs


def pool_of(subject: Subject, plan: Plan) -> BlockPool:
    """All blocks that the memory of the plan has room for."""
    dtype = subject.model.dtype
    return make_pool(
        plan.budget_tokens * subject.config.kv_bytes_per_token(dtype),
        subject.config,
        dtype,
        plan.block_size,
    )


def static_batch(pool: BlockPool, lengths: Lengths) -> int:
    """Requests of average length that fit into the pool together."""
    return most_sequences(pool, math.ceil(sum(map(sum, lengths)) / len(lengths)))


def measure_capacity(
    subject: Subject, plan: Plan, case: str, lengths: Lengths, repeats: tuple[int, int], bar: tqdm
) -> dict[str, Any]:
    """One workload in the same memory, contiguous and paged. repeats: of the continuous engines, and of the static ones."""
    prompts = [
        random_prompt(prompt, subject.config, f"request {i}")
        for i, (prompt, _) in enumerate(lengths)
    ]
    counts = [count for _, count in lengths]
    batch = static_batch(pool_of(subject, plan), lengths)
    engines: dict[str, Any] = {
        CONTINUOUS: SlotEngine(subject.model, scheduler=SlotScheduler(plan.slots, plan.budget)),
        OURS: Paged(subject.model, pool_of(subject, plan), plan.budget),
    }
    if repeats[1]:
        engines[STATIC] = StaticEngine(subject.model, max_batch=plan.slots)
        engines[PAGED_STATIC] = Paged(subject.model, pool_of(subject, plan), plan.budget, batch)
    runs = {name: Runs(engine, prompts, counts) for name, engine in engines.items()}
    seconds = in_turn(runs, {name: repeats[name in (STATIC, PAGED_STATIC)] for name in runs}, bar)
    paged = {
        name: each.steps[-1] for name, each in runs.items() if isinstance(engines[name], Paged)
    }
    return {
        **subject.about, "case": case, "slots": plan.slots, "budget": plan.budget, "batch": batch, "lengths": lengths,
        "blocks": engines[OURS].engine.scheduler.pool.count, "block_size": plan.block_size, "seconds": seconds,
        "passes": {name: each.passes for name, each in runs.items()},
        "rows": {name: run_lengths([step.rows for step in each.steps[-1]]) for name, each in runs.items()},
        "crowded": {name: crowded_rows(runs[name].steps[-1]) for name in (CONTINUOUS, OURS)},
        "preemptions": {name: sum(step.preempted for step in steps) for name, steps in paged.items()},
        "memory": {
            CONTINUOUS: slot_memory(runs[CONTINUOUS].steps[-1], subject.config.n_positions),
            **{name: block_memory(steps, plan.block_size) for name, steps in paged.items()},
        },
        "cache_bytes": {CONTINUOUS: engines[CONTINUOUS].cache.bytes, OURS: engines[OURS].engine.cache.bytes},
        "proof": {name: each.proof(subject) for name, each in runs.items()},
        "same": {name: sum(a == b for a, b in zip(each.answers, runs[CONTINUOUS].answers, strict=True)) for name, each in
                 runs.items()},
    }  # fmt: skip


def crowded_rows(steps: Sequence[SlotsRecord | BlocksRecord]) -> float:
    """Sequences in a pass, on average over those after which others still waited."""
    rows = [step.rows for step in steps if step.waiting]
    return sum(rows) / len(rows) if rows else 0.0


def slot_memory(steps: Sequence[SlotsRecord], slot_tokens: int) -> list[int]:
    """[reserved, used] in tokens, added up over the passes: each request that has a slot has all of it."""
    tokens: dict[str, int] = {}  # computed, of each request that has a slot
    reserved = used = 0
    for step in steps:
        for each in step.slots:
            tokens[each.request_id] = (
                tokens.get(each.request_id, 0) + each.prefill_tokens + each.decode_tokens
            )
        reserved += len(tokens) * slot_tokens
        used += sum(tokens.values())
        for each in step.slots:
            if each.finish_reason is not None:
                del tokens[each.request_id]
    return [reserved, used]


def block_memory(steps: Sequence[BlocksRecord], block_size: int) -> list[int]:
    """[reserved, used] in tokens, added up over the passes: each block that a table holds, and what is in it."""
    return [
        sum(step.owned_blocks for step in steps) * block_size,
        sum(step.used_tokens for step in steps),
    ]


def measure_single(
    subject: Subject, plan: Plan, lengths: tuple[int, int], bar: tqdm
) -> dict[str, Any]:
    """A single request on the engines of three stages, each of which runs its prompt whole."""
    (length, count), budget = lengths, max(plan.budget, lengths[0])
    engines: dict[str, Any] = {
        SINGLE: SingleEngine(subject.model),
        CONTINUOUS: SlotEngine(subject.model, scheduler=SlotScheduler(plan.slots, budget)),
        OURS: Paged(subject.model, pool_of(subject, plan), budget),
    }
    prompt = random_prompt(length, subject.config, "single")
    runs = {name: Runs(engine, [prompt], [count]) for name, engine in engines.items()}
    seconds = measure.alternate(
        runs, plan.single_repeats, warmup=0, progress=lambda _: bar.update()
    )
    return {
        **subject.about, "slots": plan.slots, "budget": budget, "lengths": [lengths], "seconds": seconds,
        "blocks": engines[OURS].engine.scheduler.pool.count, "block_size": plan.block_size,
        "proof": {name: each.proof(subject) for name, each in runs.items()},
    }  # fmt: skip


def measure_map(subject: Subject, plan: Plan, bar: tqdm) -> list[str]:
    """The blocks of the winning case, after each of its first passes: a text for each block, see `packed`."""
    engine = Paged(subject.model, pool_of(subject, plan), plan.budget).engine
    for i, (prompt, count) in enumerate(plan.lengths):
        engine.add(Request(random_prompt(prompt, subject.config, f"request {i}"), greedy(count)))
    frames: list[list[int]] = []
    while len(frames) < plan.frames and engine.scheduler.unfinished:
        engine.step()
        frames.append(blockmap(engine.scheduler))
    bar.update()
    return packed(frames)


def packed(frames: Sequence[Sequence[int]]) -> list[str]:
    """Frames of blocks as a text for each block: "-1x3 7x2" is free for three passes, and then of sequence 7 for two."""
    columns = zip(*frames, strict=True)
    return [
        " ".join(f"{state}x{len(list(group))}" for state, group in groupby(column))
        for column in columns
    ]


def unpacked(texts: Sequence[str]) -> list[list[int]]:
    """The frames again."""
    pairs = [[piece.split("x") for piece in text.split()] for text in texts]
    columns = [[int(state) for state, times in each for _ in range(int(times))] for each in pairs]
    return [list(frame) for frame in zip(*columns, strict=True)]


def measure_waste(plan: Plan) -> dict[str, list[int]]:
    """[reserved, used] of the winning case with memory for everybody: what the schedulers do, without a model."""
    n_positions, requests = shape_of(plan.model).n_positions, plan.requests
    kinds = {"contiguous, whole context": n_positions, "contiguous, exact length known": None}
    passes = {
        name: simulate_slots(plan.lengths, requests, plan.budget, tokens)
        for name, tokens in kinds.items()
    }
    for block_size in plan.sizes:
        blocks = requests * -(-n_positions // block_size)
        passes[f"paged, blocks of {block_size}"] = simulate_blocks(
            plan.lengths, blocks, block_size, plan.budget
        )
    return {
        name: [sum(each.reserved for each in found), sum(each.used for each in found)]
        for name, found in passes.items()
    }


# ---- measuring: what the gather costs -----------------------------------------------------------------------------------


class Pair:
    """A contiguous cache and a paged one that hold the same `context` tokens of each of `rows` sequences, the blocks shuffled.

    `contiguous` and `paged` are a decode pass over them: the logits (rows, V).
    """

    def __init__(self, subject: Subject, rows: int, context: int, block_size: int) -> None:
        config, dtype = subject.config, subject.model.dtype
        self.model, self.context = subject.model, context
        self.slots = SlotCache(config, rows, context + 1, dtype)
        self.slots.kv.normal_(generator=torch.Generator().manual_seed(0))
        each = -(-(context + 1) // block_size)
        self.blocks = PagedCache(config, rows * each, block_size, dtype=dtype)
        order = list(range(rows * each))
        random.Random("blocks").shuffle(order)
        self.tables = [order[row * each : (row + 1) * each] for row in range(rows)]
        for row, table in enumerate(self.tables):
            lines = pad(
                self.slots.kv[:, :, row], (0, 0, 0, each * block_size - context - 1)
            )  # (layers, 2, H, tokens, D)
            self.blocks.kv[:, :, :, table] = lines.unflatten(3, (each, block_size))
        self.ids = torch.arange(rows) % config.vocab_size

    @torch.inference_mode()
    def contiguous(self) -> torch.Tensor:
        attention = self.slots.extend([(row, self.context, 1) for row in range(len(self.ids))])
        return self.model.logits(self.model(self.ids, attention.positions, attention.attend))

    @torch.inference_mode()
    def paged(self) -> torch.Tensor:
        attention = self.blocks.extend([(table, self.context, 1) for table in self.tables])
        return self.model.logits(self.model(self.ids, attention.positions, attention.attend))

    @property
    def gathered_bytes(self) -> int:
        """What a paged pass copies together, in all layers: counted, not worked out."""
        attention = self.blocks.extend([(table, self.context, 1) for table in self.tables])
        return len(self.blocks.kv) * sum(tile.target.nbytes for tile in attention.tiles)

    def prove(self) -> dict[str, Any]:
        """That both passes choose the same tokens. Raises AssertionError at a difference that is no near tie."""
        scores, taken = self.contiguous().float(), self.paged().argmax(-1)
        best, differs = scores.amax(-1), scores.argmax(-1) != taken
        below = best - scores.gather(1, taken[:, None])[:, 0]  # (rows,)
        for highest, gap in zip(best[differs].tolist(), below[differs].tolist(), strict=True):
            if gap >= near_tie(self.model.dtype, highest):
                raise AssertionError(
                    f"the paged pass took a token whose logit lies {gap:.3g} below the best, {highest:.3g}"
                )
        gaps = below[differs].tolist()
        return {"tokens": len(taken), "near_ties": len(gaps), "widest_gap": max(gaps, default=0.0)}


def measure_gather(
    subject: Subject, cases: Sequence[tuple[int, int, int]], repeats: int, bar: tqdm
) -> list[dict[str, Any]]:
    """A decode pass over equal sequences, contiguous and paged in turn; cases: rows, context and block size."""
    found = []
    for rows, context, block_size in cases:
        needed = 2 * rows * context * subject.config.kv_bytes_per_token(subject.model.dtype)
        if needed > free_memory() / 2:
            bar.write(
                f"note: {rows} sequences of {context} tokens take {needed / 1e9:.1f} GB in two caches: left out"
            )
        else:
            pair = Pair(subject, rows, context, block_size)
            seconds = measure.alternate(
                {"contiguous": pair.contiguous, "paged": pair.paged}, repeats
            )
            found.append(
                {**subject.about, "rows": rows, "context": context, "block_size": block_size, "seconds": seconds,
                 "gathered_bytes": pair.gathered_bytes, "proof": pair.prove()}
            )  # fmt: skip
        bar.update()
    return found


def measure_profile(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Where the time of such a pass goes, contiguous and paged."""
    pair = Pair(subject, max(plan.rows), plan.sized_context, plan.block_size)
    found = {
        name: profile.profile(run, rows=100)
        for name, run in (("contiguous", pair.contiguous), ("paged", pair.paged))
    }
    return {
        **subject.about,
        "rows": max(plan.rows),
        "context": plan.sized_context,
        "operators": found,
    }


# ---- measuring: prefixes and preemption ---------------------------------------------------------------------------------


def measure_prefix(subject: Subject, plan: Plan, bar: tqdm) -> dict[str, Any]:
    """Seconds from a request's arrival to its first token, with and without a beginning that is there already."""
    length, config = plan.system + plan.own, subject.config
    system = random_prompt(plan.system, config, "system")
    blocks = 4 * -(-length // plan.block_size)
    schedulers = {
        on: Scheduler(BlockPool(blocks, plan.block_size), 1, length, prefix_caching=on)
        for on in (True, False)
    }
    engines = {
        on: Engine(subject.model, scheduler=scheduler) for on, scheduler in schedulers.items()
    }
    names = [MISS, HIT, FRESH_ON, FRESH_OFF]
    found: dict[str, Any] = {
        key: {name: [] for name in names} for key in ("seconds", "computed", "hit_rate")
    }
    proof: dict[str, Any] = {}
    for number, order in enumerate([names, *measure.rounds(names, plan.prefix_repeats)]):
        for name in order:
            engine = engines[name != FRESH_OFF]
            start_cold(engine.scheduler.pool)
            if name == HIT:
                engine.generate([system + random_prompt(plan.own, config, "earlier")], greedy(1))
            prompt = system + random_prompt(plan.own, config, f"{name} {number}")
            request = Request(
                prompt
                if name in (MISS, HIT)
                else random_prompt(length, config, f"{name} {number}"),
                greedy(2),
            )
            taken, counts = first_token(engine, request), engine.scheduler.counts
            proof[name] = subject.prove([request.output])
            if number:  # the round before the first warms up
                found["seconds"][name].append(taken)
                found["computed"][name].append(sum(step.prefill_tokens for step in engine.steps))
                found["hit_rate"][name].append(counts.hit_rate)
                bar.update()
    return {
        **subject.about,
        "system": plan.system,
        "own": plan.own,
        "block_size": plan.block_size,
        **found,
        "proof": proof,
    }


def first_token(engine: Engine, request: Request) -> float:
    """Run one request to its end; seconds to its first token. Records and counts are of this request alone."""
    engine.steps.clear()
    engine.scheduler.counts = Counts()
    started = time.perf_counter()
    engine.add(request)
    while not request.output.token_ids:
        engine.step()
    taken = time.perf_counter() - started
    for _ in engine.run():
        pass
    return taken


def measure_preemption(subject: Subject, plan: Plan, bar: tqdm) -> dict[str, Any]:
    """What it costs a request to lose its memory, at several lengths: seconds to its next token, less those of a plain step."""
    most = max(plan.preempted) + plan.plain_steps + 1
    blocks = -(-most // plan.block_size)
    pool, swap_pool = (BlockPool(2 * blocks, plan.block_size) for _ in range(2))
    engine = Engine(
        subject.model, scheduler=Scheduler(pool, 1, most, preemption=SWAP, swap_pool=swap_pool)
    )
    cost = engine.measure_cost()
    rows = []
    for context in plan.preempted:
        ways: list[str] = [RECOMPUTE, SWAP, FOUND]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number, order in enumerate([ways, *measure.rounds(ways, plan.preemption_repeats)]):
            for name in order:
                taken, proof = preempted_seconds(subject, engine, context, plan.plain_steps, name)
                if number:  # the round before the first warms up
                    seconds[name].append(taken)
                    bar.update()
        rows.append({"context": context, "seconds": seconds, "proof": proof})
    rates = {"flops": cost.flops, "bandwidth": cost.bandwidth, "overhead": cost.overhead}
    return {**subject.about, "rates": rates, "contexts": rows}


def preempted_seconds(
    subject: Subject, engine: Engine, context: int, steps: int, way: str
) -> tuple[float, dict[str, Any]]:
    """Seconds that a preemption at about `context` tokens costs, and the proof of the answer around it."""
    scheduler = engine.scheduler
    scheduler.preemption = SWAP if way == SWAP else RECOMPUTE
    scheduler.prefix_caching = way == FOUND
    start_cold(scheduler.pool)
    request = engine.add(
        Request(random_prompt(context - steps, subject.config, "preempted"), greedy(steps + 2))
    )
    engine.step()
    plain = [measure.seconds(engine.step) for _ in range(steps)]
    started = time.perf_counter()
    scheduler.preempt(request)
    engine.step()
    taken = time.perf_counter() - started
    if request.state is not State.FINISHED:
        raise AssertionError("the request did not get on in the step after it was preempted")
    return taken - median(plain), subject.prove([request.output])


# ---- measuring all ------------------------------------------------------------------------------------------------------


def measure_all(plan: Plan) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything that `plan` says: configuration, results, limits."""
    shape = checkpoint.load(plan.model, random_weights=True)
    limits = measure.limits(refresh=True)
    names = ("capacity", "single", "gather", "sizes", "prefix", "preemption")
    results: dict[str, Any] = {name: [] for name in names} | {"waste": measure_waste(plan)}
    with tqdm(total=plan.runs, unit="run") as bar:
        for dtype in (torch.float32, torch.bfloat16):
            subject = Subject(shape, dtype)
            whole = dtype == torch.float32
            if label(dtype) in plan.win_dtypes:
                repeats = (plan.win_repeats, plan.static_repeats * whole)
                results["capacity"].append(
                    measure_capacity(subject, plan, WIN, plan.lengths, repeats, bar)
                )
            results["single"] += [
                measure_single(subject, plan, lengths, bar) for lengths in plan.singles
            ]
            cases = [
                (rows, context, plan.block_size) for rows in plan.rows for context in plan.contexts
            ]
            results["gather"] += measure_gather(subject, cases, plan.gather_repeats, bar)
            if whole:
                full = [(plan.null_prompt, plan.null_answer)] * plan.null_requests
                results["capacity"].append(
                    measure_capacity(subject, plan, NULL, full, (plan.null_repeats, 0), bar)
                )
                cases = [(max(plan.rows), plan.sized_context, size) for size in plan.sizes]
                results["sizes"] = measure_gather(subject, cases, plan.gather_repeats, bar)
                results["profile"] = measure_profile(subject, plan)
                results["map"] = measure_map(subject, plan, bar)
                small = Subject(
                    checkpoint.load(plan.small, random_weights=plan.small != "stories"), dtype
                )
                for each in (subject, small):
                    results["prefix"].append(measure_prefix(each, plan, bar))
                    results["preemption"].append(measure_preemption(each, plan, bar))
    return {"plan": asdict(plan)}, results, limits


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything: configuration, results, limits. `quick` leaves out what takes minutes."""
    configuration, results, limits = measure_all(QUICK if quick else FULL)
    return {"quick": quick, **configuration}, results, limits


# ---- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A pass that a scheduler made: what it computed, the tokens that memory was taken for, and those that were in it."""

    parts: list[Part]
    reserved: int
    used: int


def simulate(scheduler: Any, lengths: Lengths, reserved: Callable[[], int]) -> list[Pass]:
    """The passes that a scheduler makes of requests that are all there at once, without a model.

    `reserved` is asked during each pass. No two requests begin alike.
    """
    requests = [
        Request([number] * prompt, greedy(count)) for number, (prompt, count) in enumerate(lengths)
    ]
    numbers = {id(request): number for number, request in enumerate(requests)}
    passes = []
    for request in requests:
        scheduler.add(request)
    while scheduler.unfinished:
        work = scheduler.schedule()
        taken = reserved()
        for each in work:
            each.request.computed += each.count
            each.request.output.token_ids += [numbers[id(each.request)]] * each.samples
        if isinstance(scheduler, Scheduler):
            scheduler.moves.clear()
            for each in work:
                scheduler.publish(each)
        if work:
            parts = [
                Part(numbers[id(each.request)], each.start, each.count, each.samples)
                for each in work
            ]
            passes.append(
                Pass(parts, taken, sum(request.computed for request in scheduler.running))
            )
        for request in list(scheduler.running):
            if len(request.output.token_ids) == request.sampling.max_tokens:
                scheduler.finish(request)
    return passes


def simulate_slots(
    lengths: Lengths, slots: int, budget: int, slot_tokens: int | None
) -> list[Pass]:
    """On stage 04's scheduler; slot_tokens None: each slot has room for just its request, whose length is known."""
    scheduler = SlotScheduler(slots, budget)

    def reserved() -> int:
        exact = [
            len(request.prompt_ids) + request.sampling.max_tokens - 1
            for request in scheduler.running
        ]
        return sum(exact) if slot_tokens is None else len(exact) * slot_tokens

    return simulate(scheduler, lengths, reserved)


def simulate_blocks(lengths: Lengths, blocks: int, block_size: int, budget: int) -> list[Pass]:
    """On this stage's scheduler."""
    pool = BlockPool(blocks, block_size)
    return simulate(
        Scheduler(pool, min(blocks, budget), budget), lengths, lambda: pool.owned * pool.block_size
    )


def passes_of(row: dict[str, Any], name: str) -> list[Pass]:
    """What the scheduler of stage 04, or of this one, makes of a row's workload."""
    lengths, budget = [(prompt, count) for prompt, count in row["lengths"]], row["budget"]
    if name == CONTINUOUS:
        return simulate_slots(lengths, row["slots"], budget, shape_of(row["model"]).n_positions)
    size = row["batch"] if name == PAGED_STATIC else len(lengths)
    batches = [lengths[first : first + size] for first in range(0, len(lengths), size)]
    return [
        each
        for batch in batches
        for each in simulate_blocks(batch, row["blocks"], row["block_size"], budget)
    ]


def gathered_bytes(
    config: checkpoint.Config, dtype: torch.dtype, parts: Sequence[Part], block_size: int
) -> int:
    """What a pass copies together: the whole blocks of each part but those of whole prompts, which need nothing cached."""
    blocks = sum(-(-(part.cached + part.count) // block_size) for part in parts if part.cached)
    return blocks * block_bytes(config, dtype, block_size)


def pass_seconds(
    results: dict[str, Any], row: dict[str, Any], parts: Sequence[Part], gathers: bool
) -> float:
    """The least seconds for a pass. A gather adds the time of reading what it copies: nothing computes meanwhile, and
    attention then reads the copy from the processor's cache."""
    limits, config, kind = limits_of(results), shape_of(row["model"]), getattr(torch, row["dtype"])
    seconds = pass_cost(config, kind, parts).seconds(limits, kind)
    if gathers:
        seconds += gathered_bytes(config, kind, parts, row["block_size"]) / (
            limits.bandwidth_gb_s * 1e9
        )
    return seconds


def predicted(results: dict[str, Any], row: dict[str, Any], name: str) -> tuple[int, float]:
    """Passes of an engine for a row's workload, and the least seconds for them."""
    if name in (SINGLE, STATIC):
        lengths, slots = (
            [tuple(each) for each in row["lengths"]],
            row["slots"] if name == STATIC else 1,
        )
        batches = [lengths[start : start + slots] for start in range(0, len(lengths), slots)]
        seconds = [
            static_benchmark.predicted_seconds(
                limits_of(results), row["model"], row["dtype"], batch
            )
            for batch in batches
        ]
        return sum(max(count for _, count in batch) for batch in batches), sum(seconds)
    passes = passes_of(row, name)
    return len(passes), sum(
        pass_seconds(results, row, each.parts, name != CONTINUOUS) for each in passes
    )


def crossing(places: Sequence[int], recompute: Sequence[float], swap: Sequence[float]) -> str:
    """From how many tokens on swapping is cheaper, between the measured places on a straight line."""
    gains = [one - other for one, other in zip(recompute, swap, strict=True)]
    if gains[-1] <= 0:
        return f"never, up to {places[-1]}"
    last = max((i for i, gain in enumerate(gains) if gain <= 0), default=-1)
    if last < 0:
        return f"always, from {places[0]}"
    share = -gains[last] / (gains[last + 1] - gains[last])
    return f"from {places[last] + share * (places[last + 1] - places[last]):,.0f} tokens"


# ---- from results to tables and charts ----------------------------------------------------------------------------------


def most_rows(row: dict[str, Any], name: str) -> int:
    return max(rows for rows, _ in row["rows"][name])


def mean_rows(row: dict[str, Any], name: str) -> float:
    return sum(rows * times for rows, times in row["rows"][name]) / row["passes"][name]


def unused(memory: Sequence[int]) -> float:
    """The share of what was reserved that was not used."""
    reserved, used = memory
    return 1 - used / reserved


def same_text(row: dict[str, Any], name: str) -> str:
    proof = proof_text(row["proof"][name])
    return (
        proof
        if name == CONTINUOUS
        else f"{proof}; {row['same'][name]} of {len(row['lengths'])} answers as stage 04"
    )


def win_row(results: dict[str, Any]) -> dict[str, Any]:
    """The winning case in float32."""
    return next(row for row in results["results"]["capacity"] if row["case"] == WIN)


def capacity_table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | dtype | engine | most at once | mean where others wait | mean | passes | predicted | tok/s | seconds "
        "| limit | preemptions | memory unused | cache, MB | against stage 04 | predicted | same tokens |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in results["results"]["capacity"]:
        forecast = {name: predicted(results, row, name) for name in (CONTINUOUS, OURS)}
        base, least = median(row["seconds"][CONTINUOUS]), forecast[CONTINUOUS][1]
        for name, (passes, limit) in forecast.items():
            taken = measure.summarize(row["seconds"][name])
            lines.append(
                f"| {len(row['lengths'])}, {row['case']} | {row['dtype']} | {name} | {most_rows(row, name)} "
                f"| {row['crowded'][name]:.1f} | {mean_rows(row, name):.1f} | {row['passes'][name]:,} | {passes:,} "
                f"| {taken.of(tokens_of(row)).show()} | {taken.show(2)} | {limit:.2f} | {row['preemptions'].get(name, 0)} "
                f"| {unused(row['memory'][name]):.0%} | {row['cache_bytes'][name] / 1e6:,.0f} | {base / taken.median:.2f}x "
                f"| {least / limit:.2f}x | {same_text(row, name)} |"
            )
    return "\n".join(lines)


def grid_table(results: dict[str, Any]) -> str:
    """Contiguous or paged, static or continuous; and what each brings alone, and both together."""
    row = win_row(results)
    lines = [
        "| cache | batches | engine | mean at once | passes | predicted | tok/s | seconds | against stage 03 | predicted "
        "| same tokens |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    cells = {STATIC: ("contiguous", "static"), CONTINUOUS: ("contiguous", "continuous"),
             PAGED_STATIC: ("paged", "static"), OURS: ("paged", "continuous")}  # fmt: skip
    forecast = {name: predicted(results, row, name) for name in cells}
    taken = {name: measure.summarize(row["seconds"][name]) for name in cells}
    gain = {name: taken[STATIC].median / each.median for name, each in taken.items()}
    least = {name: forecast[STATIC][1] / limit for name, (_, limit) in forecast.items()}
    for name, (cache, batches) in cells.items():
        lines.append(
            f"| {cache} | {batches} | {name} | {mean_rows(row, name):.1f} | {row['passes'][name]:,} | {forecast[name][0]:,} "
            f"| {taken[name].of(tokens_of(row)).show()} | {taken[name].show(2)} | {gain[name]:.2f}x | {least[name]:.2f}x "
            f"| {same_text(row, name)} |"
        )
    both = [
        "| | continuous alone | paged alone | the two multiplied | together |",
        "|---|--:|--:|--:|--:|",
    ]
    for title, each in (("measured", gain), ("predicted", least)):
        alone = each[CONTINUOUS], each[PAGED_STATIC]
        both.append(
            f"| {title} | {alone[0]:.2f}x | {alone[1]:.2f}x | {math.prod(alone):.2f}x | {each[OURS]:.2f}x |"
        )
    return "\n".join(lines) + "\n\n" + "\n".join(both)


def lose_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | prompt | answer | engine | tok/s | limit, tok/s | against stage 02 | predicted | same tokens |",
        "|---|--:|--:|---|--:|--:|--:|--:|---|",
    ]
    for row in results["results"]["single"]:
        limits = {name: predicted(results, row, name)[1] for name in row["seconds"]}
        ((prompt, answer),) = row["lengths"]
        for name, taken in row["seconds"].items():
            gain = median(row["seconds"][SINGLE]) / median(taken)
            lines.append(
                f"| {row['dtype']} | {prompt} | {answer} | {name} | {measure.summarize(taken).of(answer).show()} "
                f"| {answer / limits[name]:,.1f} | {gain:.2f}x | {limits[SINGLE] / limits[name]:.2f}x "
                f"| {proof_text(row['proof'][name])} |"
            )
    return "\n".join(lines)


def waste_table(results: dict[str, Any]) -> str:
    """With memory for everybody by the scheduler alone, and in the memory of the winning run by the engines' records."""
    row, plan = win_row(results), results["configuration"]["plan"]
    names = list(results["results"]["waste"])
    measured = {
        names[0]: row["memory"][CONTINUOUS],
        f"paged, blocks of {plan['block_size']}": row["memory"][OURS],
    }
    lines = [
        "| memory is taken | unused, scheduler alone | unused, measured in the winning run |",
        "|---|--:|--:|",
    ]
    for name, memory in results["results"]["waste"].items():
        found = f"{unused(measured[name]):.1%}" if name in measured else ""
        lines.append(f"| {name} | {unused(memory):.1%} | {found} |")
    return "\n".join(lines)


def crossover(pool_blocks: int, block_size: int, slot_tokens: int) -> int:
    """The least number of slots that take more memory than the pool."""
    return pool_blocks * block_size // slot_tokens + 1


def memory_table(results: dict[str, Any]) -> str:
    """By arithmetic from the shape: slots of whole contexts, a pool of fixed size, and a pool of just the blocks in use."""
    plan = Plan(**results["configuration"]["plan"])
    config, kind = shape_of(plan.model), torch.float32
    pool, megabytes = (
        BlockPool(plan.table_blocks, plan.block_size),
        block_bytes(config, kind, plan.block_size) / 1e6,
    )
    tokens = (
        plan.table_prompt + plan.table_answer - 1
    )  # the last token of an answer is never computed
    each, most = pool.blocks_for(tokens), most_sequences(pool, tokens)
    slot = config.n_positions * config.kv_bytes_per_token(kind) / 1e6
    lines = [
        f"| sequences | contiguous, MB | pool of {pool.count:,} blocks, MB | at once in it | of it in use "
        "| pool of the blocks in use, MB | contiguous against that |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for batch in plan.batches:
        here, least = min(batch, most), batch * each * megabytes
        lines.append(
            f"| {batch} | {batch * slot:,.0f} | {pool.count * megabytes:,.0f} | {here} | {here * each / pool.count:.0%} "
            f"| {least:,.0f} | {batch * slot / least:.1f}x |"
        )
    fixed, own = (
        crossover(blocks, plan.block_size, config.n_positions) for blocks in (pool.count, each)
    )
    lines.append(f"| smaller than contiguous | | from {fixed} sequences on | | | from {own} on | |")
    return "\n".join(lines)


def gather_ratio(row: dict[str, Any]) -> measure.Summary:
    """Time of the paged pass over that of the contiguous one: the median of the pairs that ran side by side, and their range."""
    pairs = zip(row["seconds"]["paged"], row["seconds"]["contiguous"], strict=True)
    return measure.summarize([paged / contiguous for paged, contiguous in pairs])


def predicted_ratio(results: dict[str, Any], row: dict[str, Any]) -> float:
    parts = [Part(number, row["context"], 1, True) for number in range(row["rows"])]
    contiguous, paged = (pass_seconds(results, row, parts, gathers) for gathers in (False, True))
    return paged / contiguous


def gather_table(results: dict[str, Any]) -> str:
    """By context, and below it by block size."""
    bandwidth = limits_of(results).bandwidth_gb_s * 1e9
    texts = []
    for rows in (results["results"]["gather"], results["results"]["sizes"]):
        lines = [
            "| dtype | sequences | context | block size | contiguous, ms | paged, ms | ratio | predicted | gathered, MB "
            "| at full bandwidth, ms | same tokens |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for row in rows:
            seconds, gathered = row["seconds"], row["gathered_bytes"]
            lines.append(
                f"| {row['dtype']} | {row['rows']} | {row['context']:,} | {row['block_size']} "
                f"| {milliseconds(seconds['contiguous'])} | {milliseconds(seconds['paged'])} | {gather_ratio(row).show(2)} "
                f"| {predicted_ratio(results, row):.2f} | {gathered / 1e6:,.0f} | {gathered / bandwidth * 1e3:.1f} "
                f"| {proof_text(row['proof'])} |"
            )
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def prefix_table(results: dict[str, Any]) -> str:
    lines = [
        "| model | prefix | TTFT, ms | limit, ms | tokens computed | found in the cache | against the first | predicted "
        "| same tokens |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in results["results"]["prefix"]:
        whole = [Part(0, 0, row["system"] + row["own"], True)]
        parts = dict.fromkeys(row["seconds"], whole) | {
            HIT: [Part(0, row["system"], row["own"], True)]
        }
        least = {name: pass_seconds(results, row, each, True) for name, each in parts.items()}
        for name, taken in row["seconds"].items():
            lines.append(
                f"| {row['model']} | {name} | {milliseconds(taken)} | {least[name] * 1e3:.1f} "
                f"| {median(row['computed'][name]):,.0f} | {median(row['hit_rate'][name]):.0%} "
                f"| {median(row['seconds'][MISS]) / median(taken):.2f}x | {least[MISS] / least[name]:.2f}x "
                f"| {proof_text(row['proof'][name])} |"
            )
    return "\n".join(lines)


def preemption_table(results: dict[str, Any]) -> str:
    """What each way costs by length; and where one becomes cheaper than the other."""
    lines = [
        "| model | context | recompute, ms | predicted | swap, ms | predicted | cheaper | predicted | recompute with own blocks "
        "cached, ms | same tokens |",
        "|---|--:|--:|--:|--:|--:|---|---|--:|---|",
    ]
    second = [
        "| model | computes at, GFLOP/s | copies at, GB/s | swap is cheaper | predicted |",
        "|---|--:|--:|---|---|",
    ]
    for row in results["results"]["preemption"]:
        config = shape_of(row["model"])
        cost = Cost(config, getattr(torch, row["dtype"]), **row["rates"])
        forecasts = {RECOMPUTE: cost.recompute, SWAP: cost.swap}
        for each in row["contexts"]:
            found = {name: median(taken) for name, taken in each["seconds"].items()}
            forecast = {name: seconds(each["context"]) for name, seconds in forecasts.items()}
            ways = [
                f"{milliseconds(each['seconds'][name])} | {forecast[name] * 1e3:.1f}"
                for name in (RECOMPUTE, SWAP)
            ]
            best = [min((RECOMPUTE, SWAP), key=costs.__getitem__) for costs in (found, forecast)]
            lines.append(
                f"| {row['model']} | {each['context']} | {' | '.join(ways)} | {' | '.join(best)} "
                f"| {milliseconds(each['seconds'][FOUND])} | {proof_text(each['proof'])} |"
            )
        measured = (
            [median(each["seconds"][name]) for each in row["contexts"]] for name in forecasts
        )
        places = range(1, config.n_positions)
        second.append(
            f"| {row['model']} | {cost.flops / 1e9:,.0f} | {cost.bandwidth / 1e9:.1f} "
            f"| {crossing([each['context'] for each in row['contexts']], *measured)} "
            f"| {crossing(places, *([seconds(place) for place in places] for seconds in forecasts.values()))} |"
        )
    return "\n".join(lines) + "\n\n" + "\n".join(second)


def profile_parts(operators: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each part of a pass."""
    parts = dict.fromkeys(("gather", "attention", "linear layers", "rest"), 0.0)
    for each in operators:
        part = {"index_select": "gather"}.get(each["operator"], each["kind"])
        parts[part if part in parts else "linear layers" if each["product"] else "rest"] += (
            each["seconds"] * 1e3
        )
    return parts


def parts_table(results: dict[str, Any]) -> str:
    """Milliseconds and shares of the parts, contiguous and paged; and the operators of the paged pass that take most."""
    found = results["results"]["profile"]
    parts = {name: profile_parts(operators) for name, operators in found["operators"].items()}
    lines = [
        f"| {found['rows']} sequences at {found['context']}, {found['dtype']} | contiguous, ms | share | paged, ms | share |",
        "|---|--:|--:|--:|--:|",
    ]
    for part in parts["paged"]:
        cells = [
            f"{each[part]:.1f} | {each[part] / sum(each.values()):.0%}" for each in parts.values()
        ]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n" + profile_table(found["operators"]["paged"][:6])


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "capacity": capacity_table(results),
        "grid": grid_table(results),
        "lose": lose_table(results),
        "waste": waste_table(results),
        "memory": memory_table(results),
        "gather": gather_table(results),
        "prefix": prefix_table(results),
        "preemption": preemption_table(results),
        "profile": parts_table(results),
    }


def capacity_chart(results: dict[str, Any]) -> Any:
    """Sequences in each pass of the winning case, contiguous and paged."""
    row = win_row(results)
    title = (
        f"In the memory of {row['slots']} whole contexts, up to {most_rows(row, OURS)} sequences"
    )
    figure, axes = draw.new_figure(title, "forward pass", "sequences in it")
    with matplotlib.rc_context(draw.style()):
        for name, colour in ((OURS, draw.COLOURS[3]), (CONTINUOUS, draw.COLOURS[0])):
            rows = [count for count, _ in row["rows"][name]]
            edges = [0, *accumulate(times for _, times in row["rows"][name])]
            axes.fill_between(edges, [*rows, rows[-1]], step="post", facecolor=colour, linewidth=0)
            words = (
                f"{name}:\n{edges[-1]:,} passes, {mean_rows(row, name):.1f} sequences on average"
            )
            end = edges[-1] if name == CONTINUOUS else edges[-1] / 2
            side = "right" if name == CONTINUOUS else "left"
            axes.annotate(words, (end, most_rows(row, name) / (1 if name == CONTINUOUS else 2)), (0, 6),
                          textcoords="offset points", ha=side, fontsize=9)  # fmt: skip
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    return figure


def waste_chart(results: dict[str, Any]) -> Any:
    found = results["results"]["waste"]
    return draw.bars(
        "Small blocks leave hardly any memory unused",
        "% of the reserved memory that holds nothing, over all passes",
        list(found),
        {"unused": [100 * unused(memory) for memory in found.values()]},
    )


def blocks_chart(results: dict[str, Any]) -> Any:
    frames = unpacked(results["results"]["map"])
    title = (
        f"Freed blocks go on to the next sequence (the first {DRAWN} of {len(frames[0])} blocks)"
    )
    return picture([frame[:DRAWN] for frame in frames], title)


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    drawn = {"capacity": capacity_chart, "waste": waste_chart, "blocks": blocks_chart}
    return {name: partial(draw_it, results) for name, draw_it in drawn.items()}


def headline(results: dict[str, Any]) -> str:
    row = win_row(results)
    gain = median(row["seconds"][CONTINUOUS]) / median(row["seconds"][OURS])
    return (
        f"in the memory of {row['slots']} slots, {row['crowded'][OURS]:.0f} sequences at once while others wait, and "
        f"{gain:.1f}x the tok/s (GPT-2 124M shape, {row['dtype']})"
    )


def main(argv: list[str] | None = None) -> None:
    about = "Measures paged memory on this CPU, beside the stages before, and proves every answer."
    benchmarks.main(STAGE, about, run, tables, argv)


if __name__ == "__main__":
    cli.run(main)
