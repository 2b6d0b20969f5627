"""Stage 07 on the command line: `python -m stage07_loadtest` loads a server, ours if none is named."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared import cli
from shared.errors import UserError
from shared.server import MODULE as SERVER
from shared.server import own_server

from . import charts, metrics, results, schedule, server, workload
from .client import HTTP_OTHER, PROTOCOL, REFUSED, Record, Target, open_session, send
from .load import Point, run_point
from .metrics import Slo, Summary
from .schedule import Schedule

MODULE = "stage07_loadtest"
USERS = (1, 2, 4, 8, 16)
SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the measured capacity, for --rates auto
LEAST_REQUESTS, REQUESTS_A_USER = 20, 4  # of a closed loop, if nobody says
OPEN_REQUESTS = 50  # of an open loop
MOST_REQUESTS = 1_000_000  # of one point
MOST_A_SECOND, MOST_MADE = (
    20,
    250_000,
)  # requests of one user, and of all, in loops that end by time: they are made beforehand
WARMUP = 8  # requests before an open loop
QUEUE = 64  # places in line that our server has at least
WORKLOADS = (
    f"{', '.join(f'{name}: {length}' for name, length in workload.LENGTHS.items())} tokens each time; mixed: lognormal lengths; "
    f"shared: {workload.SYSTEM} tokens that all have in common, and a question; default %(default)s"
)
FATAL = (REFUSED, HTTP_OTHER, PROTOCOL)  # of the first request: the others would end the same way


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    users: tuple[int, ...]
    rates: tuple[float, ...]
    auto: bool  # rates from the capacity that the closed loops have shown
    bursts: tuple[tuple[int, float], ...]  # size, seconds between two
    trace: Path | None
    workload: str
    requests: int | None
    seconds: float | None
    warmup: int | None
    repeats: int
    seed: int

    def closed(self, users: int) -> tuple[Schedule, int]:
        """The schedule, and how many requests it takes."""
        if self.requests is not None:
            count = max(users, self.requests)
        elif self.seconds is not None:
            count = max(
                users, min(MOST_MADE, math.ceil(users * (1 + self.seconds * MOST_A_SECOND)))
            )
        else:
            count = max(LEAST_REQUESTS, REQUESTS_A_USER * users)
        return schedule.closed(users, count), count

    def poisson(self, rate: float) -> tuple[Schedule, int]:
        count = self.requests or (
            max(1, round(rate * self.seconds)) if self.seconds is not None else OPEN_REQUESTS
        )
        return schedule.poisson(rate, bounded(count), self.seed), count

    def burst(self, size: int, every: float) -> tuple[Schedule, int]:
        times = OPEN_REQUESTS / size if self.seconds is None else self.seconds / every
        count = self.requests or size * max(1, math.ceil(times))
        return schedule.bursts(size, every, bounded(count)), count

    def check(self) -> None:
        """Raises UserError for a trace that cannot be read, and for more requests than a point may have."""
        for rate in self.rates:
            self.poisson(rate)
        for each in self.bursts:
            self.burst(*each)
        if self.trace is not None:
            workload.load_trace(self.trace)

    def schedules(self, points: Sequence[Point]) -> Iterator[tuple[Schedule, int]]:
        """One after the other, in rounds that each begin with another one, closed loops first: the rates of `auto` come from the
        `points` that have been measured when it is their turn."""
        yield from self._rounds([self.closed(users) for users in self.users])
        rates = [share * capacity(points) for share in SHARES] if self.auto else self.rates
        opened = [self.poisson(rate) for rate in rates] + [
            self.burst(*each) for each in self.bursts
        ]
        if self.trace is not None:
            asks = workload.load_trace(self.trace)
            opened.append((schedule.trace(asks), len(asks)))
        yield from self._rounds(opened)

    def _rounds(self, points: Sequence[tuple[Schedule, int]]) -> Iterator[tuple[Schedule, int]]:
        for start in range(self.repeats):
            yield from (points[(start + place) % len(points)] for place in range(len(points)))


def bounded(count: int) -> int:
    """`count` requests of an open loop. Raises UserError if they are too many."""
    if count > MOST_REQUESTS:
        raise UserError(
            f"{count:,} requests are too many for one point, which has {MOST_REQUESTS:,} at most: shorten --seconds."
        )
    return count


def capacity(points: Sequence[Point]) -> float:
    """Requests/s, the most that a closed loop got. Raises UserError if none got an answer."""
    most = max((metrics.summarize(point, Slo()).request_rate for point in points), default=0.0)
    if most <= 0:
        raise UserError(
            "--rates auto needs the capacity, and no request of the closed loops succeeded: give rates in numbers."
        )
    return most


# ---- measuring ----------------------------------------------------------------------------------------------------------


async def measure(target: Target, plan: Plan, told: Callable[[Point], object]) -> bool:
    """Measure all points of the plan and hand each to `told`. Cancelled in the middle of one, it hands over what that has, and
    ends; whether it came to its end.

    Raises UserError if the server cannot be asked at all.
    """
    points: list[Point] = []
    async with open_session(target) as session:
        name, context = await server.describe(session, target)
        target = replace(target, model=target.model or name)
        longest = context or workload.CONTEXT
        first = workload.make(plan.workload, 1, plan.seed, longest=longest)[0]
        check(target, await send(session, target, first, 0.0, asyncio.get_running_loop().time))
    for number, (when, count) in enumerate(plan.schedules(points), 1):
        warmup = plan.warmup if plan.warmup is not None else when.users or WARMUP
        seed = f"{plan.seed} {number}"  # other prompts for each point: a prefix cache would know those of the last one
        traced = (
            workload.load_trace(plan.trace, seed) if plan.trace and when.kind == "trace" else []
        )
        made = workload.make(
            plan.workload, warmup + (0 if traced else count), seed, longest=longest
        )
        point = await run_point(
            target, made + traced, when, workload="trace" if traced else plan.workload, warmup=warmup, seconds=plan.seconds,
            progress=True,
        )  # fmt: skip
        if when.users and plan.seconds and not plan.requests and len(point.records) == count:
            print(
                f"note: {when}: all {count} requests that were made for it were sent before the time was up",
                file=sys.stderr,
            )
        if point.records:
            points.append(point)
            told(point)
        if point.interrupted:
            return False
    return True


def check(target: Target, record: Record) -> None:
    """Raise UserError if the first request went wrong in a way in which all others would."""
    if record.failure == REFUSED:
        raise UserError(
            f"{target.url} cannot be reached ({record.detail}): start the server, or leave --url out to load ours."
        )
    if record.failure in FATAL:
        raise UserError(
            f"{target.url} does not serve completions ({record.failure}: {record.detail}): mend that first."
        )


# ---- the table ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("load", 18), ("requests", 9), ("success", 8), ("req/s", 7), ("tok/s", 8), ("TTFT p50", 9), ("p95", 7), ("TPOT p50", 9),
    ("p95", 7), ("ITL p95", 8), ("E2E p50", 8), ("p95", 7), ("goodput", 8),
)  # fmt: skip


def header(limits: Slo) -> str:
    """The lines above the rows."""
    names = "".join(
        f"{name:>{width}}" if number else f"{name:<{width}}"
        for number, (name, width) in enumerate(COLUMNS)
    )
    return f"Latencies in ms from the intended start, a failure being infinite; goodput: requests/s within {limits}.\n{names}"


def row(point: Summary) -> str:
    """One line of the table: latencies in ms, from the intended start, failures counted as infinite; rates per second."""

    def ms(name: str, percent: int, adjusted: bool = True) -> str:
        value = point.at(name, percent, adjusted)
        return "-" if value is None else "inf" if math.isinf(value) else f"{value * 1e3:,.0f}"

    cells = (
        f"{point.load:<18}", str(point.requests), f"{point.success_rate:.1%}", f"{point.request_rate:.2f}",
        f"{point.output_rate:,.1f}", ms(metrics.TTFT_INTENDED, 50), ms(metrics.TTFT_INTENDED, 95), ms(metrics.TPOT, 50),
        ms(metrics.TPOT, 95), ms(metrics.ITL, 95, False), ms(metrics.E2E_INTENDED, 50), ms(metrics.E2E_INTENDED, 95),
        f"{point.goodput:.2f}",
    )  # fmt: skip
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def notes(points: Sequence[Summary]) -> Iterator[str]:
    """What must be known beside the table: failures by kind, and reasons not to trust a point."""
    for point in points:
        failed = [f"{count} {kind}" for kind, count in point.failures.items()]
        if failed or point.flags:
            yield f"{point.load}: {'; '.join([*failed, *point.flags])}"


# ---- the command line -----------------------------------------------------------------------------------------------


def several(one: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """An argparse type: values with commas between."""
    return lambda text: tuple(one(part.strip()) for part in text.split(","))


def rates(text: str) -> object:
    """An argparse type: "auto", or rates with commas between."""
    return text if text == "auto" else several(cli.number(0, 1e6, above=True))(text)


def burst(text: str) -> tuple[int, float]:
    """An argparse type: "8x2" is eight requests every two seconds."""
    size, _, every = text.partition("x")
    try:
        return cli.whole_number(1, 100_000)(size), cli.number(0, 86_400, above=True)(every)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"'{text[:40]}' is no burst: write 8x2 for eight requests every two seconds"
        ) from None


def slo(text: str) -> Slo:
    """An argparse type: "ttft=1,tpot=0.2", in seconds."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise argparse.ArgumentTypeError(
                f"'{text[:40]}' is no list of limits: write ttft=1,tpot=0.2,e2e=10 or some of them"
            )
        found[name] = cli.number(0, 1e6, above=True)(value)
    return Slo(**found)


def address(text: str) -> str:
    """An argparse type: a server's address, without the path of the API."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no port, or no IPv6 address
        good = False
    if not good or parts.username is not None or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(
            f"'{text[:80]}' is no address: write it as http://127.0.0.1:8000"
        )
    return text.rstrip("/").removesuffix("/v1")


def key(text: str) -> str:
    """An argparse type: what a header can carry."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(
            "the key has a line end or another control character in it: leave that out"
        )
    return text


def parser() -> cli.Parser:
    found = cli.Parser(
        MODULE,
        "Stage 07, the load test: load an OpenAI-style server, or ours, and tell what its users would see.",
        f"  python -m {MODULE}\n"
        f"  python -m {MODULE} --users 1,4,16 --rates auto --out results\n"
        f"  python -m {MODULE} --users 1,2,4,8,16,32,64,128 --model gpt2 --out results -- --dtype bfloat16\n"
        f"  python -m {MODULE} --url http://127.0.0.1:8000 --rates 2,4 --seconds 30 --slo ttft=0.5,tpot=0.1\n"
        f"what stands behind -- are options of our server: python -m {SERVER} --help",
    )
    who = found.add_argument_group("the server")
    who.add_argument(
        "--url",
        type=address,
        help="address of the server; default is to start ours, and to stop it at the end",
    )
    who.add_argument(
        "--model",
        metavar="NAME",
        help="what that server calls its model, or which one ours shall load; default is the first",
    )
    who.add_argument(
        "--api-key",
        type=key,
        default=os.environ.get("STAIRCASE_API_KEY", ""),
        metavar="KEY",
        help="default is the variable STAIRCASE_API_KEY",
    )
    who.add_argument(
        "--timeout", type=cli.number(0, 86_400, above=True), default=300.0, metavar="S",
        help="seconds for one request, after which it has failed; default %(default)g",
    )  # fmt: skip
    when = found.add_argument_group("the load: one point of the result for each number")
    when.add_argument(
        "--users", type=several(cli.whole_number(1, 10_000)), metavar="N,N,...",
        help=f"closed loops: so many users who each wait for their answer; default {','.join(map(str, USERS))}, or none if there "
        "is another load",
    )  # fmt: skip
    when.add_argument(
        "--rates", type=rates, default=(), metavar="R,R,...",
        help="open loops: so many requests per second at random times; auto takes "
        f"{', '.join(f'{share * 100:g}' for share in SHARES)} %% of what the closed loops got",
    )  # fmt: skip
    when.add_argument(
        "--bursts",
        type=several(burst),
        default=(),
        metavar="NxS,...",
        help="open loops: N requests at once every S seconds",
    )
    when.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="an open loop: the requests of a JSONL file at their times; a repeat sends its prompts again",
    )  # fmt: skip
    when.add_argument(
        "--requests", type=cli.whole_number(1, 1_000_000), metavar="N",
        help=f"of each point; default {REQUESTS_A_USER} a user and {LEAST_REQUESTS} at least, {OPEN_REQUESTS} in open loops",
    )  # fmt: skip
    when.add_argument(
        "--seconds",
        type=cli.number(0, 86_400, above=True),
        metavar="S",
        help="send nothing later than S seconds after the start",
    )
    when.add_argument(
        "--warmup", type=cli.whole_number(0, 10_000), metavar="N",
        help=f"requests before each point that do not count; default one a user, {WARMUP} before open loops",
    )  # fmt: skip
    when.add_argument(
        "--repeats", type=cli.whole_number(1, 1000), default=1, metavar="N",
        help="measure every point so often, in rounds that each begin with another one; default %(default)s",
    )  # fmt: skip
    what = found.add_argument_group("requests and results")
    what.add_argument("--workload", choices=workload.WORKLOADS, default="short", help=WORKLOADS)
    what.add_argument(
        "--seed",
        type=cli.whole_number(0, 2**31),
        default=0,
        metavar="N",
        help="of prompts and times; default %(default)s",
    )
    what.add_argument(
        "--slo", type=slo, default=Slo(ttft=1.0, tpot=0.2), metavar="LIMITS",
        help="limits in seconds that goodput keeps; default ttft=1,tpot=0.2",
    )  # fmt: skip
    what.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write every request, the summary and the charts",
    )
    return found


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises UserError as `Plan.check` does."""
    auto = options.rates == "auto"
    opened = options.rates or options.bursts or options.trace
    plan = Plan(
        users=options.users or (USERS if auto or not opened else ()), rates=() if auto else options.rates, auto=auto,
        bursts=options.bursts, trace=options.trace, workload=options.workload, requests=options.requests,
        seconds=options.seconds, warmup=options.warmup, repeats=options.repeats, seed=options.seed,
    )  # fmt: skip
    plan.check()
    return plan


def server_options(options: argparse.Namespace, plan: Plan, given: Sequence[str]) -> list[str]:
    """The command line of our server: room in its line for all users, and what was `given` behind --."""
    model = ["--model", options.model] if options.model else []
    return [
        "--max-queue",
        str(max(QUEUE, *plan.users, *(size for size, _ in plan.bursts))),
        *model,
        *given,
    ]


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, given = parser().parse_args(arguments[:split]), arguments[split + 1 :]
    if options.url and given:
        raise UserError(
            "There are options for our server behind --, and a --url of another one: leave one of them out."
        )
    plan = plan_of(options)
    if plan.trace and plan.repeats > 1:
        print(
            "note: what a trace says word for word is sent again in each repeat, and a prefix cache knows it",
            file=sys.stderr,
        )
    behind = None if options.url else server_options(options, plan, given)
    writer = None
    if options.out:
        writer = results.Writer(
            options.out,
            configuration(options, plan, behind),
            slo=options.slo,
            seed=options.seed,
            secret=options.api_key,
        )
    summaries: list[Summary] = []

    def told(point: Point) -> None:
        if not summaries:
            print(header(options.slo))
        summaries.append(writer.add(point) if writer else metrics.summarize(point, options.slo))
        print(row(summaries[-1]), flush=True)

    with nullcontext(None) if behind is None else own_server(behind) as ours:
        target = Target(
            options.url if ours is None else ours.url,
            options.model if options.url else None,
            options.api_key,
            options.timeout,
        )
        complete = run(measure(target, plan, told))
    print("\n".join(["", *notes(summaries)]))
    if writer and summaries:
        charts.draw(summaries, options.out)
        print(f"Written: {options.out}")
    if not complete:
        raise KeyboardInterrupt
    return 0


def run(measuring: Coroutine[Any, Any, bool]) -> bool:
    """Run it to its end or to Ctrl-C, at which it keeps what it has; whether it came to its end."""
    try:
        return asyncio.run(measuring)
    except KeyboardInterrupt:  # between two points
        return False


def configuration(
    options: argparse.Namespace, plan: Plan, behind: Sequence[str] | None
) -> dict[str, Any]:
    """What was asked for, as it is written down; `behind` are the options of our server."""
    own = None if behind is None else results.without(options.api_key, shlex.join(behind))
    asked = {field.name: getattr(plan, field.name) for field in fields(plan)}
    asked["trace"] = str(options.trace) if options.trace else None
    return {
        "url": options.url,
        "model": options.model,
        "server": own,
        "timeout": options.timeout,
    } | asked


if __name__ == "__main__":
    cli.run(main)
