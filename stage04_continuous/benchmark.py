"""What a decision before every pass buys, where it buys nothing, and what it costs: `python -m stage04_continuous.benchmark`.

Writes reports/<machine>/stage04_continuous.json; `python -m shared.bench.report` turns it into tables and charts. Stage 03, this
stage and `transformers`' own continuous batching run in turn on the same weights, dtype, threads and prompts, each answer with
the same number of tokens. All have room for as many sequences of as many tokens.

A throughput says little alone, so slot occupancy stands beside it: of all places that the passes had (slots times passes),
the share that computed for a request which was still there.

Every answer of stages 03 and 04 is proved: one pass over prompt and answer alone, without cache or neighbours, must choose the
same tokens. Nothing is written if one differs.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import matplotlib
import numpy as np
import torch
from tqdm import tqdm

from shared import charts as draw
from shared import checkpoint, cli, measure, roofline
from shared.bench import benchmarks
from shared.bench.tables import label, limits_of, limits_table, median, milliseconds
from shared.parity import random_prompt
from shared.peers import PAGE, TransformersContinuous, transformers_model
from stage01_forward.generation import Output
from stage02_kv_cache.benchmark import greedy, proof_text, shape_of
from stage02_kv_cache.engine import Engine as SingleEngine
from stage03_batching import benchmark as static_benchmark
from stage03_batching.benchmark import Subject
from stage03_batching.engine import Engine as StaticEngine

from .engine import Engine, SlotRecord, SlotsRecord
from .request import Request
from .scheduler import Scheduler, Work
from .timeline import gantt

STAGE = "stage04_continuous"
DTYPES = (torch.float32, torch.bfloat16)
SINGLE, STATIC, OURS = "stage 02, one request", "stage 03, static", "stage 04, continuous"
KINDS = {"transformers, sdpa": "sdpa", "transformers, eager": "eager"}  # its two attentions
WHOLE = "whole"  # a prompt that is not cut into chunks

Lengths = list[tuple[int, int]]  # tokens of prompt and answer of each request, in order of arrival


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often. Lengths are in tokens; a budget is that of a pass."""

    model: str = "gpt2"
    # Win: answers of very different lengths, all there at the start. Half of them are shorter than `middle`.
    win_dtypes: tuple[str, ...] = ("float32",)
    requests: int = 96
    slots: int = 32
    budget: int = 256
    prompts: tuple[int, int] = (16, 64)
    answers: tuple[int, int] = (8, 512)
    middle: int = 66
    win_repeats: int = 2
    win_peer_repeats: int = 1
    # Null and peers: as many equal requests as there are slots. The first pass takes all prompts, as in a static batch.
    equal_slots: tuple[int, ...] = (32, 64)
    equal_prompt: int = 16
    equal_answer: int = 32
    equal_repeats: int = 3
    equal_peer_repeats: int = 2
    # Lose: one request.
    single_prompt: int = 64
    single_answer: int = 64
    single_repeats: int = 3
    # A long prompt arrives among neighbours in the middle of their answers.
    neighbours: int = 8
    neighbours_prompt: int = 64
    before: int = 24  # tokens of each neighbour before the long prompt arrives
    after: int = 64  # and after that
    long_prompt: int = 900
    long_answer: int = 8
    chunks: tuple[int, ...] = (64, 128, 256)
    chunk_repeats: int = 3
    # The part of the winning run that is drawn as a Gantt chart.
    gantt_slots: int = 16
    gantt_steps: int = 200

    @property
    def runs(self) -> int:
        """How many timed runs that is."""
        equal = len(self.equal_slots) * (
            2 * self.equal_repeats + len(KINDS) * self.equal_peer_repeats
        )
        each = equal + 3 * self.single_repeats + (len(self.chunks) + 1) * self.chunk_repeats
        return len(DTYPES) * each + len(self.win_dtypes) * (
            2 * self.win_repeats + self.win_peer_repeats
        )


FULL = Plan()
QUICK = Plan(
    requests=24, slots=8, budget=128, answers=(4, 96), middle=16, win_repeats=1,
    equal_slots=(8,), equal_answer=16, equal_peer_repeats=1, single_answer=16, single_repeats=2,
    after=24, chunks=(128,), chunk_repeats=1, gantt_slots=8,
)  # fmt: skip


def workload(plan: Plan) -> Lengths:
    """The requests of the winning case: prompts of any length within bounds, answers lognormal and cut off at theirs.

    Lognormal: most answers are short, and a few very long. Were all alike, there would be nothing to win.
    """
    rng = random.Random("lengths of stage 04")
    shortest, longest = plan.answers
    lengths = []
    for _ in range(plan.requests):
        answer = round(rng.lognormvariate(math.log(plan.middle), 1.0))
        lengths.append((rng.randint(*plan.prompts), min(max(answer, shortest), longest)))
    return lengths


# ---- measuring ----------------------------------------------------------------------------------------------------------


class Runs:
    """One workload of one of our engines, as often as it is called: its answers, and the record of every pass."""

    def __init__(self, engine: Any, prompts: list[list[int]], counts: list[int]) -> None:
        self.engine, self.prompts, self.counts = engine, prompts, counts
        self.outputs: list[list[Output]] = []  # a run -> an answer for each prompt
        self.steps: list[list[Any]] = []  # a run -> StepRecords
        engine.generate(prompts[:2], greedy(2))  # warms up

    def __call__(self) -> None:
        self.outputs.append(
            self.engine.generate(self.prompts, [greedy(count) for count in self.counts])
        )
        self.steps.append(list(self.engine.steps))

    @property
    def answers(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs[-1]]

    @property
    def passes(self) -> int:
        return len(self.steps[-1])

    @property
    def busy(self) -> int:
        """Places that computed for a request which was still there, over all passes."""
        return sum(step.rows for step in self.steps[-1])

    def proof(self, subject: Subject) -> dict[str, Any]:
        """Every run's answers are proved; what is told is of the last one. Raises AssertionError."""
        return [subject.prove(outputs) for outputs in self.outputs][-1]


class PeerRuns:
    """The same of `transformers`. Its records are its own: a place counts as busy once for each token of an answer."""

    def __init__(
        self, peer: TransformersContinuous, prompts: list[list[int]], counts: list[int]
    ) -> None:
        self.peer, self.prompts, self.counts = peer, prompts, counts
        self.answers: list[list[int]] = []
        self.busy = sum(counts)
        peer.generate(prompts[:2], [2, 2])  # warms up

    def __call__(self) -> None:
        self.answers = self.peer.generate(self.prompts, self.counts)

    @property
    def passes(self) -> int:
        return self.peer.passes


def in_turn(
    runs: Mapping[str, Callable[[], object]], repeats: Mapping[str, int], bar: tqdm
) -> dict[str, list[float]]:
    """`measure.alternate` for variants of which some run less often: those sit out the last rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number, names in enumerate(measure.rounds(list(runs), max(repeats.values()))):
        for name in names:
            if number < repeats[name]:
                seconds[name].append(measure.seconds(runs[name]))
                bar.update()
    return seconds


def measure_together(
    subject: Subject,
    peers: Mapping[str, Any],
    lengths: Lengths,
    slots: int,
    budget: int,
    repeats: tuple[int, int],
    bar: tqdm,
) -> tuple[dict[str, Any], dict[str, Runs]]:
    """One workload on stage 03, this stage and the `transformers` models in `peers`, all with the same slots.

    repeats: of ours, and of the peers. Returns what was found, and our runs.
    """
    prompts = [
        random_prompt(prompt, subject.config, f"request {i}")
        for i, (prompt, _) in enumerate(lengths)
    ]
    counts = [count for _, count in lengths]
    slot_tokens = max(prompt + count for prompt, count in lengths)
    ours = {
        STATIC: Runs(StaticEngine(subject.model, max_batch=slots), prompts, counts),
        OURS: Runs(
            Engine(subject.model, scheduler=Scheduler(slots, budget), slot_tokens=slot_tokens),
            prompts,
            counts,
        ),
    }
    with ExitStack() as stack:
        theirs = {
            name: PeerRuns(
                stack.enter_context(TransformersContinuous(peer, slots, slot_tokens, budget)),
                prompts,
                counts,
            )
            for name, peer in peers.items()
        }
        every: dict[str, Runs | PeerRuns] = {**ours, **theirs}
        seconds = in_turn(every, {name: repeats[name in theirs] for name in every}, bar)
    found = {
        **subject.about, "slots": slots, "slot_tokens": slot_tokens, "budget": budget, "lengths": lengths, "seconds": seconds,
        "passes": {name: each.passes for name, each in every.items()},
        "busy": {name: each.busy for name, each in every.items()},
        "cache_bytes": {STATIC: ours[STATIC].engine.cache_bytes, OURS: ours[OURS].engine.cache.bytes},
        "proof": {name: each.proof(subject) for name, each in ours.items()},
        "same": {
            name: sum(a == b for a, b in zip(every[name].answers, every[other].answers, strict=True))
            for name, other in {OURS: STATIC, **dict.fromkeys(theirs, OURS)}.items()
        },
    }  # fmt: skip
    return found, ours


def measure_equal(
    subject: Subject, peers: Mapping[str, Any], plan: Plan, slots: int, bar: tqdm
) -> dict[str, Any]:
    """Equal requests, one for each slot; and of every pass that decodes them all, its time and that of the bookkeeping."""
    lengths = [(plan.equal_prompt, plan.equal_answer)] * slots
    repeats = (plan.equal_repeats, plan.equal_peer_repeats)
    found, ours = measure_together(
        subject, peers, lengths, slots, slots * plan.equal_prompt, repeats, bar
    )
    decode = [[step for step in steps if step.decode_tokens == slots] for steps in ours[OURS].steps]
    found["step"] = [[step.seconds for step in steps] for steps in decode]
    found["bookkeeping"] = [[step.bookkeeping_seconds for step in steps] for steps in decode]
    return found


def measure_win(
    subject: Subject, peers: Mapping[str, Any], plan: Plan, bar: tqdm
) -> dict[str, Any]:
    """Answers of very different lengths; and what the slots did, for the charts."""
    repeats = (plan.win_repeats, plan.win_peer_repeats)
    found, ours = measure_together(
        subject, peers, workload(plan), plan.slots, plan.budget, repeats, bar
    )
    found["rows"] = {
        name: run_lengths([step.rows for step in each.steps[-1]]) for name, each in ours.items()
    }
    steps = ours[OURS].steps[-1][: plan.gantt_steps]
    found["gantt"] = {
        "slots": plan.gantt_slots,
        "steps": len(steps),
        "pieces": pieces(steps, plan.gantt_slots),
    }
    return found


def measure_single(subject: Subject, plan: Plan, bar: tqdm) -> dict[str, Any]:
    """A single request on the engines of three stages; those that batch have room for as many as in the winning case."""
    prompt = random_prompt(plan.single_prompt, subject.config, "single")
    slot_tokens = min(plan.prompts[1] + plan.answers[1], subject.config.n_positions)
    engines: dict[str, Any] = {
        SINGLE: SingleEngine(subject.model),
        STATIC: StaticEngine(subject.model, max_batch=plan.slots),
        OURS: Engine(
            subject.model, scheduler=Scheduler(plan.slots, plan.budget), slot_tokens=slot_tokens
        ),
    }
    runs = {name: Runs(engine, [prompt], [plan.single_answer]) for name, engine in engines.items()}
    seconds = measure.alternate(
        runs, plan.single_repeats, warmup=0, progress=lambda _: bar.update()
    )
    return {
        **subject.about, "slots": plan.slots, "budget": plan.budget,
        "lengths": [(plan.single_prompt, plan.single_answer)], "seconds": seconds,
        "passes": {name: each.passes for name, each in runs.items()},
        "cache_bytes": {
            SINGLE: engines[SINGLE].cache.bytes, STATIC: engines[STATIC].cache_bytes, OURS: engines[OURS].cache.bytes,
        },
        "proof": {name: each.proof(subject) for name, each in runs.items()},
    }  # fmt: skip


class Arrival:
    """A long prompt arrives while its neighbours decode: what it does to them, as often as it is called.

    The neighbours get a token each in every pass, so one list of times between their tokens holds for all of them.
    """

    def __init__(self, subject: Subject, engine: Engine, scheduler: Scheduler, plan: Plan) -> None:
        self.engine, self.scheduler, self.plan = engine, scheduler, plan
        self.prompts = [
            random_prompt(plan.neighbours_prompt, subject.config, f"neighbour {i}")
            for i in range(plan.neighbours)
        ]
        self.long_prompt = random_prompt(plan.long_prompt, subject.config, "long")
        self.before: list[
            list[float]
        ] = []  # a run -> seconds between a neighbour's tokens, before the long prompt arrives
        self.after: list[list[float]] = []
        self.first: list[float] = []  # a run -> seconds from its arrival to its first token
        self.outputs: list[list[Output]] = []

    def __call__(self) -> None:
        self.engine.scheduler = (
            self.scheduler
        )  # nothing waits or runs, so one cache serves every way of scheduling
        sampling = greedy(1 + self.plan.before + self.plan.after)
        neighbours = [self.engine.add(Request(prompt, sampling)) for prompt in self.prompts]
        while not all(each.output.token_ids for each in neighbours):
            self.engine.step()
        self.before.append(self._gaps(self.plan.before))
        newcomer = self.engine.add(Request(self.long_prompt, greedy(self.plan.long_answer)))
        self.after.append(self._gaps(self.plan.after, newcomer))
        if any(each.output.finish_reason is None for each in neighbours):
            raise AssertionError("a neighbour went without a token in some pass")
        for _ in self.engine.run():
            pass
        self.outputs.append([each.output for each in [*neighbours, newcomer]])

    def _gaps(self, count: int, newcomer: Request | None = None) -> list[float]:
        """Seconds of each of `count` steps. In which of them `newcomer` says its first token is written down."""
        started = last = time.perf_counter()
        gaps: list[float] = []
        for _ in range(count):
            silent = newcomer is not None and not newcomer.output.token_ids
            self.engine.step()
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            if silent and newcomer is not None and newcomer.output.token_ids:
                self.first.append(now - started)
        return gaps


def chunk_scheduler(plan: Plan, name: str) -> Scheduler:
    """The scheduler that runs the long prompt in chunks of `name` tokens, or whole; the budget has room for all of it."""
    slots, budget = plan.neighbours + 1, plan.neighbours + plan.long_prompt
    return (
        Scheduler(slots, budget, chunked=False)
        if name == WHOLE
        else Scheduler(slots, budget, max_chunk=int(name))
    )


def measure_chunking(subject: Subject, plan: Plan, bar: tqdm) -> dict[str, Any]:
    """A long prompt among decoding neighbours, in chunks of several sizes and whole."""
    names = [*map(str, plan.chunks), WHOLE]
    tokens = max(
        plan.long_prompt + plan.long_answer, plan.neighbours_prompt + 1 + plan.before + plan.after
    )
    engine = Engine(subject.model, scheduler=chunk_scheduler(plan, WHOLE), slot_tokens=tokens)
    Arrival(subject, engine, engine.scheduler, plan)()  # warms up
    runs = {name: Arrival(subject, engine, chunk_scheduler(plan, name), plan) for name in names}
    measure.alternate(runs, plan.chunk_repeats, warmup=0, progress=lambda _: bar.update())
    proofs = [subject.prove(outputs) for each in runs.values() for outputs in each.outputs]
    return {
        **subject.about, "neighbours": plan.neighbours, "neighbours_prompt": plan.neighbours_prompt,
        "long_prompt": plan.long_prompt, "long_answer": plan.long_answer, "proof": proofs[-1],
        "before": {name: each.before for name, each in runs.items()},
        "after": {name: each.after for name, each in runs.items()},
        "first": {name: each.first for name, each in runs.items()},
    }  # fmt: skip


def measure_all(plan: Plan) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything that `plan` says: configuration, results, limits."""
    shape = checkpoint.load(plan.model, random_weights=True)
    limits = measure.limits(refresh=True)
    results: dict[str, Any] = {"win": [], "equal": [], "single": [], "chunking": []}
    with tqdm(total=plan.runs, unit="run") as bar:
        for dtype in DTYPES:
            subject = Subject(shape, dtype)
            peers = {name: transformers_model(shape, dtype, kind) for name, kind in KINDS.items()}
            equal = [measure_equal(subject, peers, plan, slots, bar) for slots in plan.equal_slots]
            results["equal"] += equal
            if label(dtype) in plan.win_dtypes:
                best = faster_peer(equal)
                results["win"].append(measure_win(subject, {best: peers[best]}, plan, bar))
            del peers
            results["single"].append(measure_single(subject, plan, bar))
            results["chunking"].append(measure_chunking(subject, plan, bar))
    return {"plan": asdict(plan)}, results, limits


def faster_peer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which of the two attentions of `transformers` took less time over all of `rows`."""
    return min(KINDS, key=lambda name: sum(median(row["seconds"][name]) for row in rows))


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything: configuration, results, limits. `quick` leaves out what takes minutes."""
    configuration, results, limits = measure_all(QUICK if quick else FULL)
    return {"quick": quick, **configuration}, results, limits


# ---- records in few numbers ---------------------------------------------------------------------------------------------


def run_lengths(values: Sequence[int]) -> list[list[int]]:
    """[7, 7, 3] as [[7, 2], [3, 1]]: a value, and how often it comes in a row."""
    return [[value, len(list(group))] for value, group in groupby(values)]


def pieces(steps: Sequence[SlotsRecord], slots: int) -> list[list[int]]:
    """What the first `slots` slots did, as [slot, request, first step, end, prefill, finished], the last two being 0 or 1.

    Requests are counted from 1 in the order in which they come to a slot: those that come together take the lowest first.
    """
    found: list[list[int]] = []
    numbers: dict[str, int] = {}
    last: dict[int, list[int]] = {}  # slot -> its newest piece
    for number, step in enumerate(steps):
        for each in sorted(step.slots, key=lambda each: each.slot):
            request, prefill = (
                numbers.setdefault(each.request_id, len(numbers) + 1),
                int(each.prefill_tokens > 0),
            )
            if each.slot >= slots:
                continue
            piece = last.get(each.slot)
            if piece is None or piece[1] != request or piece[3:5] != [number, prefill]:
                piece = last[each.slot] = [each.slot, request, number, number, prefill, 0]
                found.append(piece)
            piece[3], piece[5] = number + 1, int(each.finish_reason is not None)
    return found


def records(drawn: Mapping[str, Any]) -> list[SlotsRecord]:
    """Of what `measure_win` keeps for the Gantt chart, the records again, as far as the chart looks at them."""
    slots: list[list[SlotRecord]] = [[] for _ in range(drawn["steps"])]
    for slot, request, start, end, prefill, finished in drawn["pieces"]:
        for number in range(start, end):
            reason = "length" if finished and number == end - 1 else None
            slots[number].append(
                SlotRecord(slot, f"request-{request}", prefill, 1 - prefill, reason)
            )
    return [
        SlotsRecord(
            rows=len(each),
            prefill_tokens=sum(one.prefill_tokens for one in each),
            decode_tokens=sum(one.decode_tokens for one in each),
            seconds=0.0,
            slots=tuple(each),
        )
        for each in slots
    ]


# ---- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a pass computes of one request (by its number): `count` tokens after `cached`; `samples` if a token comes of it."""

    request: int
    cached: int
    count: int
    samples: bool


def simulate(scheduler: Scheduler, arrivals: Sequence[tuple[int, int, int]]) -> list[list[Part]]:
    """The passes that `scheduler` makes of requests (step of arrival, tokens of prompt, tokens of answer), without a model."""
    requests = [Request([0] * prompt, greedy(count)) for _, prompt, count in arrivals]
    numbers = {id(request): number for number, request in enumerate(requests)}
    late = sorted(range(len(arrivals)), key=lambda number: arrivals[number][0])
    passes: list[list[Part]] = []
    step = 0
    while late or scheduler.unfinished:
        while late and arrivals[late[0]][0] <= step:
            scheduler.add(requests[late.pop(0)])
        work, step = scheduler.schedule(), step + 1
        if work:
            passes.append(
                [
                    Part(numbers[id(each.request)], each.start, each.count, each.samples)
                    for each in work
                ]
            )
        for each in work:
            _pretend(scheduler, each)
    return passes


def _pretend(scheduler: Scheduler, work: Work) -> None:
    request = work.request
    request.computed += work.count
    if work.samples:
        request.output.token_ids.append(0)
        if len(request.output.token_ids) == request.sampling.max_tokens:
            scheduler.finish(request)


def pass_cost(
    config: checkpoint.Config, dtype: torch.dtype, parts: Sequence[Part]
) -> roofline.Cost:
    """Of one packed pass: the weights are read once for all parts, and each part's cache is its own."""
    weights = roofline.forward_cost(config, dtype, 0, sampled=sum(part.samples for part in parts))
    each = [
        roofline.forward_cost(config, dtype, part.count, part.cached, sampled=0) for part in parts
    ]
    return roofline.Cost(
        weights.flops + sum(cost.flops for cost in each),
        weights.bytes + sum(cost.bytes - weights.bytes for cost in each),
    )


def predicted(results: dict[str, Any], row: dict[str, Any], name: str) -> tuple[int, float]:
    """Passes of stage 03 (`name` STATIC) or of this stage for a row's workload, and the least seconds for them."""
    limits, config, kind = limits_of(results), shape_of(row["model"]), getattr(torch, row["dtype"])
    lengths, slots = [tuple(each) for each in row["lengths"]], row["slots"]
    if name == STATIC:
        batches = [lengths[start : start + slots] for start in range(0, len(lengths), slots)]
        seconds = [
            static_benchmark.predicted_seconds(limits, row["model"], row["dtype"], batch)
            for batch in batches
        ]
        return sum(max(count for _, count in batch) for batch in batches), sum(seconds)
    passes = simulate(
        Scheduler(slots, row["budget"]), [(0, prompt, count) for prompt, count in lengths]
    )
    return len(passes), sum(
        pass_cost(config, kind, parts).seconds(limits, kind) for parts in passes
    )


def predicted_arrival(
    results: dict[str, Any], row: dict[str, Any], name: str
) -> tuple[float, float]:
    """Least seconds of the longest pass that the long prompt causes, and from its arrival to its first token."""
    limits, config, kind = limits_of(results), shape_of(row["model"]), getattr(torch, row["dtype"])
    plan = Plan(
        **{
            key: row[key]
            for key in ("neighbours", "neighbours_prompt", "long_prompt", "long_answer")
        }
    )
    before, after = len(row["before"][name][0]), len(row["after"][name][0])
    crowd = [(0, plan.neighbours_prompt, 1 + before + after)] * plan.neighbours
    passes = simulate(
        chunk_scheduler(plan, name), [*crowd, (1 + before, plan.long_prompt, plan.long_answer)]
    )
    first = next(
        i
        for i, parts in enumerate(passes)
        if any(p.request == plan.neighbours and p.samples for p in parts)
    )
    begins = next(
        i for i, parts in enumerate(passes) if any(p.request == plan.neighbours for p in parts)
    )
    seconds = [
        pass_cost(config, kind, parts).seconds(limits, kind) for parts in passes[begins : first + 1]
    ]
    return max(seconds), sum(seconds)


# ---- from results to tables and charts ----------------------------------------------------------------------------------


def tokens_of(row: Mapping[str, Any]) -> int:
    """Tokens of all answers."""
    return sum(count for _, count in row["lengths"])


def occupancy(row: Mapping[str, Any], name: str) -> float:
    return row["busy"][name] / (row["slots"] * row["passes"][name])


def same_text(row: dict[str, Any], name: str) -> str:
    count = len(row["lengths"])
    if name == STATIC:
        return proof_text(row["proof"][name])
    if name == OURS:
        return (
            f"{proof_text(row['proof'][name])}; {row['same'][name]} of {count} answers as stage 03"
        )
    return f"{row['same'][name]} of {count} answers as stage 04"


def together_table(results: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Stage 03 and this one, with what was predicted; `transformers` too in the rows where it ran beside them."""
    lines = [
        "| dtype | slots | engine | tok/s | slots in use | passes | predicted | seconds | limit | cache, MB | against stage 03 "
        "| predicted | same tokens |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        config, kind, seconds = shape_of(row["model"]), getattr(torch, row["dtype"]), row["seconds"]
        forecast = {name: predicted(results, row, name) for name in (STATIC, OURS)}
        pages = (
            math.ceil(row["slot_tokens"] / PAGE)
            * PAGE
            * row["slots"]
            * config.kv_bytes_per_token(kind)
        )
        for name, taken in seconds.items():
            rate = measure.summarize(taken).of(tokens_of(row))
            passes = limit = gain = ""
            if name in forecast:
                passes, limit = f"{forecast[name][0]:,}", f"{forecast[name][1]:.2f}"
                gain = f"{forecast[STATIC][1] / forecast[name][1]:.2f}x"
            lines.append(
                f"| {row['dtype']} | {row['slots']} | {name} | {rate.show()} | {occupancy(row, name):.0%} "
                f"| {row['passes'][name]:,} | {passes} | {measure.summarize(taken).show(2)} | {limit} "
                f"| {row['cache_bytes'].get(name, pages) / 1e6:,.0f} | {median(seconds[STATIC]) / median(taken):.2f}x | {gain} "
                f"| {same_text(row, name)} |"
            )
    return "\n".join(lines)


def win_table(results: dict[str, Any]) -> str:
    rows = results["results"]["win"]
    lines = ["| dtype | requests | this stage against | gain in tok/s |", "|---|--:|---|--:|"]
    for row in rows:
        for name, taken in row["seconds"].items():
            if name != OURS:
                gain = median(taken) / median(row["seconds"][OURS])
                lines.append(f"| {row['dtype']} | {len(row['lengths'])} | {name} | {gain:.2f}x |")
    return together_table(results, rows) + "\n\n" + "\n".join(lines)


def null_table(results: dict[str, Any]) -> str:
    """The equal requests, without `transformers`."""
    rows = [
        {**row, "seconds": {name: row["seconds"][name] for name in (STATIC, OURS)}}
        for row in results["results"]["equal"]
    ]
    return together_table(results, rows)


def peers_table(results: dict[str, Any]) -> str:
    """The equal requests again, this stage beside `transformers`."""
    lines = [
        "| dtype | slots | engine | tok/s | slots in use | passes | same tokens |",
        "|---|--:|---|--:|--:|--:|---|",
    ]
    for row in results["results"]["equal"]:
        for name, taken in row["seconds"].items():
            if name != STATIC:
                lines.append(
                    f"| {row['dtype']} | {row['slots']} | {name} | {measure.summarize(taken).of(tokens_of(row)).show()} "
                    f"| {occupancy(row, name):.0%} | {row['passes'][name]:,} | {same_text(row, name)} |"
                )
        gain = median(row["seconds"][faster_peer([row])]) / median(row["seconds"][OURS])
        lines.append(
            f"| {row['dtype']} | {row['slots']} | **this stage against the faster transformers** | {gain:.2f}x | | | |"
        )
    return "\n".join(lines)


def lose_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | engine | tok/s | limit, tok/s | slots in use | cache, MB | against stage 02 | predicted | same tokens |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in results["results"]["single"]:
        limits = {name: predicted(results, row, name)[1] for name in (STATIC, OURS)}
        limits[SINGLE] = limits[STATIC]  # a batch of one is the cached engine
        for name, taken in row["seconds"].items():
            rate, occupied = (
                measure.summarize(taken).of(tokens_of(row)),
                1 if name == SINGLE else 1 / row["slots"],
            )
            gain = median(row["seconds"][SINGLE]) / median(taken)
            lines.append(
                f"| {row['dtype']} | {name} | {rate.show()} | {tokens_of(row) / limits[name]:,.1f} | {occupied:.0%} "
                f"| {row['cache_bytes'][name] / 1e6:,.0f} | {gain:.2f}x | {limits[SINGLE] / limits[name]:.2f}x "
                f"| {proof_text(row['proof'][name])} |"
            )
    return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The least of `values` that so large a share of them does not exceed: one that was measured, never one between two."""
    return float(np.percentile(values, 100 * share, method="inverted_cdf"))


def latencies(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """Seconds between a neighbour's tokens in all runs: without a long prompt, and for each way of running one."""
    calm = [gap for runs in row["before"].values() for gaps in runs for gap in gaps]
    return {"no long prompt": calm} | {
        chunk_name(name): [gap for gaps in runs for gap in gaps]
        for name, runs in row["after"].items()
    }


def chunk_name(name: str) -> str:
    return WHOLE if name == WHOLE else f"chunks of {name}"


def chunking_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | long prompt | neighbours' ITL p50, ms | p99, ms | max, ms | limit of the longest pass, ms "
        "| its own first token after, ms | limit, ms | same tokens |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in results["results"]["chunking"]:
        waits = {chunk_name(name): (name, first) for name, first in row["first"].items()}
        for shown, gaps in latencies(row).items():
            own = ["", "", "", ""]
            if shown in waits:
                name, first = waits[shown]
                longest, least = predicted_arrival(results, row, name)
                own = [
                    f"{longest * 1e3:.1f}",
                    milliseconds(first, 0),
                    f"{least * 1e3:,.0f}",
                    proof_text(row["proof"]),
                ]
            spread = " | ".join(
                f"{value * 1e3:,.1f}"
                for value in (*(percentile(gaps, p) for p in (0.5, 0.99)), max(gaps))
            )
            lines.append(f"| {row['dtype']} | {shown} | {spread} | {' | '.join(own)} |")
    return "\n".join(lines)


def overhead_table(results: dict[str, Any]) -> str:
    """Passes that decode all slots: the medians of their time and of what was not the model, and the share."""
    lines = [
        "| dtype | rows | passes | step p50, ms | scheduler, sampling, postprocessing p50, ms | share p50 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in results["results"]["equal"]:
        shares = [
            [own / whole for own, whole in zip(*each, strict=True)]
            for each in zip(row["bookkeeping"], row["step"], strict=True)
        ]
        every = [share for run in shares for share in run]
        own = [median(run) for run in shares]
        lines.append(
            f"| {row['dtype']} | {row['slots']} | {len(every)} | {median([s for run in row['step'] for s in run]) * 1e3:.1f} "
            f"| {median([s for run in row['bookkeeping'] for s in run]) * 1e3:.2f} "
            f"| {median(every):.1%} ({min(own):.1%} to {max(own):.1%}) |"
        )
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "win": win_table(results),
        "null": null_table(results),
        "lose": lose_table(results),
        "chunking": chunking_table(results),
        "overhead": overhead_table(results),
        "peers": peers_table(results),
    }


def gantt_chart(results: dict[str, Any]) -> Any:
    drawn = results["results"]["win"][0]["gantt"]
    return gantt(
        records(drawn), "Slots are handed on while their neighbours decode", slots=drawn["slots"]
    )


def occupancy_chart(results: dict[str, Any]) -> Any:
    """All places of all passes, of stage 03 above and of this stage below; those in use are dark."""
    row = results["results"]["win"][0]
    slots, gap = row["slots"], row["slots"] * 0.45
    figure, axes = draw.new_figure(
        "Places that compute for somebody, and places that do not", "forward pass", "rows in use"
    )
    with matplotlib.rc_context(draw.style()):
        ticks: dict[float, str] = {}
        for number, name in enumerate((OURS, STATIC)):
            floor, passes = number * (slots + gap), row["passes"][name]
            values = [rows for rows, _ in row["rows"][name]]
            edges = [0, *accumulate(times for _, times in row["rows"][name])]
            axes.fill_between([0, passes], floor, floor + slots, facecolor=draw.FAINT, linewidth=0)
            axes.fill_between(
                edges,
                floor,
                [floor + rows for rows in [*values, values[-1]]],
                step="post",
                facecolor=draw.COLOURS[number],
                linewidth=0,
            )
            words = f"{name}: {passes:,} passes, {occupancy(row, name):.0%} of the places in use"
            axes.annotate(words, (0, floor + slots), (0, 4), textcoords="offset points", fontsize=9)
            ticks |= {floor: "0", floor + slots: str(slots)}
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.set_xlim(left=0)
        axes.set_ylim(0, 2 * (slots + gap))
        axes.grid(False, axis="y")
    return figure


def chunking_chart(results: dict[str, Any]) -> Any:
    row = results["results"]["chunking"][0]
    found = latencies(row)
    return draw.bars(
        "In chunks, a long prompt holds its neighbours up less",
        f"milliseconds between tokens, prompt of {row['long_prompt']} (GPT-2 124M shape, {row['dtype']})",
        list(found),
        {
            "p50": [percentile(gaps, 0.5) * 1e3 for gaps in found.values()],
            "p99": [percentile(gaps, 0.99) * 1e3 for gaps in found.values()],
            "max": [max(gaps) * 1e3 for gaps in found.values()],
        },
    )


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {name: partial(draw_it, results) for name, draw_it in CHARTS.items()}


CHARTS = {"gantt": gantt_chart, "occupancy": occupancy_chart, "chunking": chunking_chart}


def headline(results: dict[str, Any]) -> str:
    row = results["results"]["win"][0]
    gain = median(row["seconds"][STATIC]) / median(row["seconds"][OURS])
    return (
        f"{gain:.1f}x static batching where answers differ in length: {occupancy(row, OURS):.0%} of the slots in use "
        f"instead of {occupancy(row, STATIC):.0%} (GPT-2 124M shape, {row['dtype']})"
    )


def main(argv: list[str] | None = None) -> None:
    about = "Measures continuous batches on this CPU, beside static ones and those of transformers, and proves every answer."
    benchmarks.main(STAGE, about, run, tables, argv)


if __name__ == "__main__":
    cli.run(main)
