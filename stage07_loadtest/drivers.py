"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

from shared.course.driver import Clock, outcome

from . import client, load, metrics, schedule
from .client import Record
from .workload import Ask


def record_of(draw: Random, index: int = 0) -> Record:
    """A request that was sent, or not, and came to some end."""
    intended = draw.uniform(0, 10)
    record = Record(index, intended, draw.randint(1, 50))
    if draw.random() < 0.1:  # its end is the last: whether that is one of a request is open
        record.failure, record.end = "not sent", intended + 20
        return record
    record.sent = intended + draw.choice([0.0, draw.random()])
    chunks = [record.sent + draw.random() for _ in range(draw.choice([0, 1, 2, 8]))]
    record.chunks = sorted(chunks)
    record.chunk_tokens = [draw.randint(0, 3) for _ in chunks]
    # Not at a chunk: whether one at the very beginning of the steady part arrived in it is open.
    record.end = (record.chunks or [record.sent])[-1] + draw.choice([1e-6, draw.random()])
    record.completion_tokens = draw.choice([None, 0, 1, 2, sum(record.chunk_tokens)])
    record.failure = draw.choice([None, None, None, "timeout", "error"])
    return record


def percentiles(draw: Random) -> Any:
    seen: list[Any] = []
    for _ in range(30):
        count = draw.choice([0, 1, 5, 7, 100, 101])
        values = [draw.choice([1.0, draw.random(), float("inf")]) for _ in range(count)]
        percent = draw.choice([0, 50, 80, 81, 7, 100, 99, -1, 100.5, draw.uniform(0, 100)])
        result = outcome(metrics.percentile, values, percent)
        call = f"percentile({count} values, {percent})"
        seen.append({"call": call, "result": result, "values": values})
    for count in (0, 1, 30, 999, 1000, 1001):
        values = [draw.random() for _ in range(count)]
        often = 0.5 if count < 999 else 0.1  # a curve is slow by a right way that counts for each
        failures, drawn = draw.choice([None, 0, 1, 20]), draw.random() < often
        call = f"distribution({count} values, {failures}, {drawn})"
        seen.append({"call": call, "result": metrics.distribution(values, failures, drawn)})
    for count in (1, 40):
        records = [record_of(draw, index) for index in range(count)]
        seen.append({"call": f"latencies of {records}", "result": metrics.latencies(records)})
    return seen


def arrivals(draw: Random) -> Any:
    """Schedules as they are: the rule judges them, since other draws are as good."""
    seen: list[Any] = []
    for count in (1, 2, 400):
        rate, seed = draw.choice([0.5, 3.0, 100.0]), draw.randrange(1000)
        for arguments in ((rate, count, seed), (rate, count, seed), (2 * rate, count, seed)):
            times = outcome(schedule.poisson, *arguments)
            seen.append({"call": f"poisson{arguments}", "rate": arguments[0], "times": times})
    for arguments in ((0.0, 5, 1), (-1.0, 5, 1), (2.0, 0, 1), (2.0, 5, 2), (2.0, 5, 3)):
        times = outcome(schedule.poisson, *arguments)
        seen.append({"call": f"poisson{arguments}", "rate": arguments[0], "times": times})
    return seen


def independent(expected: Any, result: Any) -> str:
    """Whether schedules are right, whatever their draws: the last time is exact, the same seed
    gives the same times and another seed others, twice the rate half the times, and gaps are
    exponential (Kolmogorov and Smirnov's distance, which exceeds the bound once in a million)."""
    from math import exp, sqrt

    if not isinstance(result, list) or len(result) != len(expected):
        return "the schedules are not all there"
    times: list[list[float]] = []
    for right, entry in zip(expected, result, strict=True):
        call, answer, wanted = right["call"], entry["times"], right["times"]
        if answer.keys() != wanted.keys() or answer.get("error") != wanted.get("error"):
            return f"{call}: {answer} is not like {wanted}"
        if "error" in wanted:
            continue
        starts, last = answer["starts"], wanted["starts"][-1]
        for name in ("kind", "users", "rate"):
            if answer[name] != wanted[name]:
                return f"{call}: {name} is {answer[name]}, not {wanted[name]}"
        if len(starts) != len(wanted["starts"]) or not all(type(at) is float for at in starts):
            return f"{call}: there are {len(starts)} times, not {len(wanted['starts'])}"
        if abs(starts[-1] - last) > 1e-9 * last or sorted(starts) != starts or starts[0] < 0:
            return f"{call}: the last time is {starts[-1]}, not {last}, or they are out of order"
        times.append(starts)
        gaps = sorted(b - a for a, b in zip([0.0, *starts], starts, strict=False))
        mean, count = last / len(gaps), len(gaps)
        if count < 100:
            continue
        steps = ((at + 1) / count - (1 - exp(-gap / mean)) for at, gap in enumerate(gaps))
        distance = max(max(abs(step), abs(step - 1 / count)) for step in steps)
        if distance > 2.8 / sqrt(count):
            return f"{call}: the gaps are not exponential (distance {distance:.3f})"
    for first in (0, 3, 6):
        base, same, double = times[first : first + 3]
        halves = [at / 2 for at in base]
        if base != same or max(abs(a - b) for a, b in zip(halves, double, strict=True)) > 1e-6:
            return "the same seed gives other times, or twice the rate another pattern"
    return "two seeds give the same times" if times[-1] == times[-2] else ""


def streams(draw: Random) -> Any:
    seen: list[Any] = []
    for _ in range(12):
        lines = []
        for _ in range(draw.randint(1, 6)):
            data = draw.choice([b"{}", b" x ", b"[DONE]", "é".encode(), b"data: y", b""])
            head = draw.choice([b"data: ", b"data:", b": ", b"event: ", b"DATA: ", b" data:"])
            lines.append(head + data + draw.choice([b"\n", b"\r\n", b"\n\n"]))
        whole = b"".join(lines) + draw.choice([b"", b"data: unfinished"])
        cuts = sorted(draw.sample(range(len(whole) + 1), min(len(whole), draw.randint(0, 8))))
        ends = [0, *cuts, len(whole)]
        pieces = [
            (float(n), whole[a:b]) for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False))
        ]
        seen.append({"call": f"events({pieces})", "events": list(client.events(pieces))})
    for _ in range(20):
        record, reason = Record(0, 0.0, 5), draw.choice(["stop", "length"])
        for at in range(draw.randint(1, 4)):
            event = event_of(draw, reason)
            taken = taken_by(record, float(at), event)
            call = f"_take of {json.dumps(event)}"
            seen.append({"call": call, "result": taken, "record": record.__dict__.copy()})
    return seen


def taken_by(record: Record, at: float, event: dict[str, Any]) -> Any:
    try:
        return client._take(record, at, event)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
        return "not a completion chunk"


def event_of(draw: Random, reason: str) -> dict[str, Any]:
    """An event of an answer that ends for one reason: of two, which one stays is open."""
    choice: dict[str, Any] = {"text": draw.choice(["", "a", "ab"])}
    if draw.random() < 0.5:
        choice["token_ids"] = draw.choice([None, [], [1], [1, 2, 3]])
    if draw.random() < 0.4:
        choice["logprobs"] = draw.choice([None, {"tokens": ["a", "b"]}, {"tokens": []}])
    if draw.random() < 0.4:
        choice["finish_reason"] = draw.choice([None, reason, reason])
    event: dict[str, Any] = {"choices": draw.choice([[], [choice], [choice, {"text": "other"}]])}
    if draw.random() < 0.4:
        usage = {"prompt_tokens": draw.randrange(9), "completion_tokens": draw.randrange(9)}
        event["usage"] = draw.choice([None, usage])
    if draw.random() < 0.15:
        event["error"] = draw.choice([None, "it broke", {"message": "it broke"}])
    if draw.random() < 0.1:
        event.pop("choices")
    return event


def loops(draw: Random) -> Any:
    """Both loops over a server whose answers take random times, by a clock of their own."""
    seen: list[Any] = []
    for closed in (True, True, False, False):
        asks = [Ask([1], draw.randint(1, 9)) for _ in range(draw.randint(1, 12))]
        stays = [draw.choice([0.0, 0.25, 1.0, draw.random() * 3]) for _ in asks]
        starts = sorted(draw.choice([0.0, 1.0, draw.random() * 4]) for _ in asks)
        seconds, users = draw.choice([None, None, 1.0, 2.5]), draw.randint(1, 4)
        # The loop may be held up before it begins, but not where late requests might be too late.
        late = draw.choice([0.0, 1.5]) if seconds is None else 0.0

        async def work(
            asks: Any = asks, stays: Any = stays, starts: Any = starts, late: float = late,
            seconds: Any = seconds, users: int = users, closed: bool = closed,
        ) -> list[Any]:  # fmt: skip
            loop, sent = asyncio.get_running_loop(), list[Any]()
            run: Any = load.Run(None, None, asks, seconds, None)  # type: ignore[arg-type]
            run.clock = loop.time

            async def one(index: int, ask: Ask, intended: float) -> Record:
                sent.append((index, asks.index(ask), round(intended, 9), round(loop.time(), 9)))
                await asyncio.sleep(stays[index])
                return Record(index, intended, 1, end=loop.time())

            run._one = one
            await asyncio.sleep(late)
            async with asyncio.TaskGroup() as group:
                if closed:
                    turns = enumerate(asks)
                    for _ in range(users):
                        group.create_task(run._user(turns))
                else:
                    await run._dispatch(starts, group)
            return [sorted(sent), round(loop.time(), 9)]

        with asyncio.Runner(loop_factory=Clock) as runner:
            sent = runner.run(work())
        kind = f"{users} users" if closed else f"starts at {starts}, {late} s late"
        call = f"{kind}, answers after {stays}, seconds={seconds}"
        seen.append({"call": call, "sent": sent})
    return seen


def law(draw: Random) -> Any:
    seen: list[Any] = []
    for _ in range(8):
        records = [record_of(draw, index) for index in range(draw.choice([0, 1, 5, 40]))]
        seconds = draw.choice([3.0, 12.0, 60.0])  # in 60 s they are too far apart
        count = draw.choice([0, 50, 99, 100, 300])
        times = sorted(draw.random() * seconds for _ in range(count))
        samples = [(at, draw.randint(0, 9)) for at in times]
        call = f"little of {len(records)} records, {count} samples, {seconds} s"
        seen.append({"call": call, "result": metrics.little(records, samples, seconds)})
        users = draw.choice([None, 1, 4, len(records), len(records) + 1])
        call = f"steady of {records}, {users} users"
        if users != 0:
            seen.append(
                {"call": call, "result": metrics.steady(records, users) if records else None}
            )
    return seen


def goals(draw: Random) -> Any:
    seen: list[Any] = []
    records = [record_of(draw, index) for index in range(40)]
    for record in records:
        limits = metrics.Slo(*(draw.choice([None, 0.2, 0.8, 2.0]) for _ in range(3)))
        exact = metrics.tpot(record), metrics.ttft_intended(record)
        if draw.random() < 0.3 and None not in exact:
            limits = metrics.Slo(exact[1], exact[0], metrics.e2e_intended(record))
        values = exact[0], metrics.itl(record), metrics.meets(record, limits)
        seen.append({"call": f"{record}, {limits}", "values": values})
    limits = metrics.Slo(1.0, 0.5, 3.0)
    rate = metrics.goodput(records, limits, 7.0)
    met = Counter(metrics.meets(record, limits) for record in records)
    return [*seen, {"call": f"goodput with {limits}", "rate": rate, "met": met}]


DRIVERS = {1: percentiles, 2: arrivals, 3: streams, 4: loops, 5: law, 6: goals}
RULES = {2: independent}
