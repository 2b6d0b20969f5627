"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shared.config import Config
from shared.course.driver import Entry, outcome, tensors, tiny
from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams

from . import cache, engine, scheduler
from .engine import SchedulerT
from .plan import AnyScheduler, Plan, Share, Work
from .request import Request

Options = dict[str, Any]  # of a scheduler
GROUPED = Config(50, 64, 24, 2, 6, n_kv_head=3, name="grouped")


def options_of(draw: Random, longest: int = 9) -> SamplingParams:
    """Sampling options, most of them random."""
    return SamplingParams(
        max_tokens=draw.randint(1, longest),
        temperature=draw.choice([0, 0.8, 1.5]),
        top_k=draw.choice([0, 5]),
        seed=draw.randrange(1000),
        stop_token_ids=tuple(draw.sample(range(100), draw.choice([0, 0, 20]))),
        ignore_eos=draw.random() < 0.5,
        logprobs=draw.choice([None, None, 2]),
    )


def prompt_of(draw: Random, longest: int = 20) -> list[int]:
    return [draw.randrange(100) for _ in range(draw.randint(1, longest))]


def queued(draw: Random, id: str, longest: int = 9) -> Request:
    return Request(prompt_of(draw), options_of(draw, longest), id, draw.randint(-1, 2))


# ---- tasks ----


def pack(draw: Random) -> Iterator[Entry]:
    """Plans of requests in the middle of their lives."""
    for _ in range(4):
        plan = Plan()
        for place in range(draw.randint(0, 5)):
            request = queued(draw, str(place))
            for _ in range(draw.randint(0, 4)):
                request.output.append(Token(draw.randrange(100), None, None))
            start = draw.randrange(request.token_count)
            count = draw.randint(1, request.token_count - start)
            plan.work.append(Work(request, draw.randrange(9), start, count, draw.randint(0, count)))
        call = "Plan.tokens of " + str([(w.start, w.count, w.rows) for w in plan.work])
        yield {"call": call, "tokens": plan.tokens()}


def shares_of(draw: Random, slots: int, lengths: list[int], most: int) -> list[cache.Share]:
    """A pass: some slots in any order, each with new tokens after `lengths`, which grow."""
    shares = []
    for slot in draw.sample(range(slots), draw.randint(1, slots)):
        count = min(draw.choice([1, 1, 1, 2, 3, 7, 30]), most - lengths[slot])
        if count:
            shares.append((slot, lengths[slot], count))
            lengths[slot] += count
    return shares


def groups(draw: Random) -> Iterator[Entry]:
    for _ in range(8):
        lengths = [draw.choice([0, 0, 9, 10, 40, draw.randrange(60)]) for _ in range(6)]
        shares = shares_of(draw, 6, lengths, 64)
        if not shares:
            continue
        attention = cache.SlotCache(GROUPED, 6).extend(shares)
        call = f"the pass {shares} (slot, position, tokens)"
        yield {"call": call, "addresses": cache.addresses(shares)}
        entry: Entry = {"call": call, "groups": attention.groups, "slots": attention.slots}
        yield entry | {"positions": attention.positions, "order": attention.order}


def attend(draw: Random) -> Iterator[Entry]:
    """Passes over a cache that is full of other numbers."""
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        group = draw.choice([1, 2])
        slots = cache.SlotCache(GROUPED, 5, dtype=kind)
        heads = GROUPED.n_head
        kv_heads = heads // group
        slots.kv = tensors(draw, 2, 2, 5, kv_heads, 64, 4, dtype=kind)
        lengths = [0] * 5
        for _ in range(4):
            shares = shares_of(draw, 5, lengths, 64)
            if not shares:
                continue
            attention = slots.extend(shares)
            tokens = len(attention.positions)
            q = tensors(draw, tokens, heads, 4)
            k, v = tensors(draw, 2, tokens, kv_heads, 4)
            layer = draw.randrange(2)
            out = attention.attend(layer, q, k, v).to(kind)
            slot, position = draw.choice(shares)[:2]
            call = f"attend in the pass {shares} (slot, position, tokens)"
            yield {"call": call, "out": out, "written": slots.kv[layer, :, slot, :, position]}


def settings(draw: Random) -> Options:
    sequences, chunked = draw.randint(1, 4), draw.random() < 0.7
    return {
        "max_sequences": sequences,
        "token_budget": draw.randint(max(sequences, 20), 40)
        if draw.random() < 0.4
        else sequences + draw.randint(0, 12),
        "policy": draw.choice(scheduler.POLICIES),
        "max_chunk": draw.choice([None, None, 1, 4, 9]) if chunked else None,
        "chunked": chunked,
        "patience": draw.choice([1, 3, 256]),
    }


class Budgeted(AnyScheduler, Protocol):
    """A scheduler of stage 04 or 05."""

    token_budget: int
    chunked: bool


BudgetedT = TypeVar("BudgetedT", bound=Budgeted)


def lives(
    draw: Random,
    chosen: BudgetedT,
    shown: Callable[[BudgetedT, Plan], Entry],
    longest: int = 9,
    often: float = 0.35,
) -> Iterator[Entry]:
    """A scheduler with requests that come, get tokens and end; some are aborted. Without a model:
    each request that asks for a row gets a token. `shown` describes a step."""
    requests = list[Request]()
    for number in range(draw.randint(10, 40)):
        while draw.random() < often:
            parents = [r for r in requests if r.state.name == "RUNNING"]
            request = queued(draw, f"r{len(requests)}", longest)
            if hasattr(chosen, "tables") and parents and draw.random() < 0.4:
                request = Request(parents[0].output.prompt_ids, request.sampling, request.id, 0)
                request.parent = parents[0]
            if len(request.prompt_ids) > chosen.token_budget and not chosen.chunked:
                continue
            if isinstance(outcome(chosen.check, len(request.prompt_ids), longest), Exception):
                continue
            requests.append(request)
            chosen.add(request)
        alive = [r for r in requests if r.state.name in ("WAITING", "RUNNING")]
        if alive and draw.random() < 0.1:
            chosen.finish(draw.choice(alive))
        plan = chosen.schedule()
        yield {"call": f"step {number} of a scheduler", **shown(chosen, plan)}
        chosen.advance(plan)
        for work in plan.work:
            if work.rows:
                work.request.output.append(Token(draw.randrange(100), None, None))
            if len(work.request.output.token_ids) >= work.request.sampling.max_tokens:
                chosen.finish(work.request)


def step_of(chosen: scheduler.Scheduler, plan: Plan) -> Entry:
    """What a step of stage 04 planned, and what it left behind."""
    return {
        "work": [(w.request.id, w.table, w.start, w.count, int(w.rows)) for w in plan.work],
        "wipes": plan.moves,
        "running": [(r.id, r.slot, r.state) for r in chosen.running],
        "waiting": [r.id for r in chosen.waiting],
        "free": sorted(chosen.free_slots),
        "step": chosen.step,
    }


def schedule(draw: Random) -> Iterator[Entry]:
    for _ in range(6):
        options = settings(draw)
        chosen = scheduler.Scheduler(**options)
        yield {"call": f"Scheduler({options})", "steps": lives(draw, chosen, step_of)}


def patience(draw: Random) -> Iterator[Entry]:
    """Who is next among requests that have waited for different times."""
    for _ in range(40):
        policy, steps = draw.choice(scheduler.POLICIES), draw.choice([1, 2, 5, 30])
        chosen = scheduler.Scheduler(policy=policy, patience=steps)
        for place in range(draw.randint(1, 6)):
            chosen.step += draw.randint(0, 12)
            chosen.add(queued(draw, f"r{place}"))
        chosen.step += draw.randint(0, 12)
        lines = [(r.id, r.priority, r.arrival_step) for r in chosen.waiting]
        call = f"step {chosen.step}, {policy}, patience {steps}, {lines}"
        yield {"call": call, "next": chosen._next_waiting().id}


class Log:
    """Writes down the calls of a step, and how the engine looks in each; raises where `fails`."""

    def __init__(self, built: engine.Engine, fails: Callable[[str], bool]) -> None:
        self.built, self.fails = built, fails
        self.events: list[object] = []
        built.recorder.model_time = self
        built.observers.append(self)
        for owner, name in (
            (built.scheduler, "schedule"),
            (built.scheduler, "advance"),
            (built.runner, "move"),
            (built.runner, "run"),
        ):
            setattr(owner, name, self.logged(name, getattr(owner, name)))

    seconds = 0.0

    def logged(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            self.note(name, arguments if name == "run" else ())
            if self.fails(name):
                raise RuntimeError(name)
            return call(*arguments)

        return wrapped

    def note(self, name: str, arguments: object = ()) -> None:
        planned = [(w.request.id, w.start, w.count, int(w.rows)) for w in self.built.plan.work]
        self.events.append((name, planned, arguments))

    def __enter__(self) -> None:
        self.note("timed from here")

    def __exit__(self, *_: object) -> None:
        self.note("to here")

    def before(self, plan: Plan) -> None:
        self.note("before")

    def after(self, plan: Plan) -> None:
        self.note("after")


def whole_engine(
    draw: Random,
    built: engine.Engine[SchedulerT],
    ask: Callable[[str], Request],
    trouble: float = 0.0,
) -> Iterator[Entry]:
    """An engine with requests that come and go, aborts, and passes that fail."""
    requests = list[Request]()
    log = Log(built, lambda name: name in ("move", "run") and draw.random() < trouble)
    for number in range(draw.randint(8, 25)):
        while draw.random() < 0.4 and len(requests) < 12:
            requests.append(built.add(ask(f"r{len(requests)}")))
        if built.requests and draw.random() < 0.08:
            built.abort(draw.choice(sorted(built.requests)))
        log.events.clear()
        tokens = outcome(built.step)
        entry: Entry = {"call": f"step {number} of an engine", "tokens": tokens}
        entry |= {"events": list(log.events), "steps": len(built.steps)}
        if isinstance(tokens, Exception):
            entry["failed"] = [r.id for r in built.fail(UserError("it failed"))]
        entry["left"] = sorted(built.requests)
        yield entry | {"running": [(r.id, r.computed) for r in built.scheduler.running]}
    outputs = [(r.id, r.state, r.output.finish_reason, r.output.token_ids) for r in requests]
    yield {"call": "the outputs", "outputs": outputs}


def steps(draw: Random) -> Iterator[Entry]:
    model = tiny(draw)
    for trouble in (0.0, 0.15):
        options = settings(draw) | {"chunked": True}
        built = engine.make(model, scheduler=scheduler.Scheduler(**options), eos_ids=(3, 7, 40, 41))
        yield from whole_engine(draw, built, lambda id: queued(draw, id), trouble)
    # A request whose logits are not finite ends without a token.
    built = engine.make(model, contexts=3)
    requests = [built.add(queued(draw, f"bad{place}")) for place in range(3)]
    run = built.runner.run

    def spoilt(ids: Sequence[int], shares: Sequence[Share], rows: Sequence[int]) -> Tensor:
        logits = run(ids, shares, rows).clone()
        logits[draw.randrange(len(logits))] = torch.nan
        return logits

    setattr(built.runner, "run", spoilt)  # noqa: B010
    tokens = built.step()
    outputs = [(r.id, r.state, r.output.finish_reason) for r in requests]
    yield {"call": "a pass with NaN", "tokens": tokens, "outputs": outputs}


DRIVERS = {1: pack, 2: groups, 3: attend, 4: schedule, 5: patience, 6: steps}
