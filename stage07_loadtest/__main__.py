"""Load a server, by default ours: `python -m stage07_loadtest`."""

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

from shared import cli
from shared.errors import UserError
from shared.server import MODULE as SERVER
from shared.server import own_server

from . import metrics, results, schedule, server, workload
from .client import HTTP_OTHER, PROTOCOL, REFUSED, Record, Target, open_session, send
from .load import Point, run_point
from .metrics import Slo, Summary
from .schedule import Schedule
from .workload import Ask, Lengths

MODULE = "stage07_loadtest"
USERS = (1, 2, 4, 8, 16)
SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the measured capacity, for --rates auto
LEAST_REQUESTS, REQUESTS_A_USER = 20, 4  # defaults of a closed loop
OPEN_REQUESTS = 50  # default of an open loop
MOST_REQUESTS = 1_000_000  # of one point
# Closed loops that end by time: prompts made beforehand, at most per user and second, and in all.
MOST_A_SECOND, MOST_MADE = 20, 250_000
WARMUP = 8  # requests before an open loop
QUEUE = 64  # least --max-queue of our server
FIXED_LENGTHS = ", ".join(f"{name}: {length}" for name, length in workload.LENGTHS.items())
WORKLOADS = (
    f"prompt tokens; {FIXED_LENGTHS}; mixed: lognormal lengths; "
    f"shared: {workload.SYSTEM} common tokens and a question"
)
FATAL = (REFUSED, HTTP_OTHER, PROTOCOL)  # of the first request: all others would fail like it


@dataclass(frozen=True)
class Plan:
    """The points to measure."""

    users: tuple[int, ...]
    rates: tuple[float, ...]
    auto: bool  # rates are SHARES of the capacity that the closed loops measure
    bursts: tuple[tuple[int, float], ...]  # (requests, seconds from one burst to the next)
    trace: Path | None
    workload: str
    prompt_tokens: Lengths | None
    answer_tokens: Lengths | None
    requests: int | None
    seconds: float | None
    warmup: int | None
    repeats: int
    seed: int

    def closed(self, users: int) -> tuple[Schedule, int]:
        """The schedule and its number of requests."""
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

    @property
    def content(self) -> str:
        """What is requested, as recorded: the workload's name, or the lengths that replace its
        own."""
        lengths_of = {"prompts": self.prompt_tokens, "answers": self.answer_tokens}
        texts = [f"{name} {lengths}" for name, lengths in lengths_of.items() if lengths]
        return ", ".join(texts if len(texts) == 2 else [self.workload, *texts])

    def make(self, count: int, seed: int | str, longest: int) -> list[Ask]:
        """Requests; raises UserError as `workload.make` does."""
        prompts, answers = self.prompt_tokens, self.answer_tokens
        return workload.make(
            self.workload, count, seed, longest=longest, prompts=prompts, answers=answers
        )

    def check(self) -> None:
        """Raises UserError for an unreadable trace, for more than MOST_REQUESTS in a point, and for
        lengths given with only a trace, which has its own."""
        lengths = self.prompt_tokens or self.answer_tokens
        if lengths and self.trace and not (self.users or self.rates or self.bursts):
            raise UserError(
                "The lengths of a trace are in its file: leave out --prompt-tokens and "
                "--answer-tokens, or name another load beside --trace."
            )
        for rate in self.rates:
            self.poisson(rate)
        for size, every in self.bursts:
            self.burst(size, every)
        if self.trace is not None:
            workload.load_trace(self.trace)

    def schedules(self, points: Sequence[Point]) -> Iterator[tuple[Schedule, int]]:
        """The schedules in order, closed loops first. Every round of repeats begins with a
        different point. `points`: those measured so far, from which `auto` takes its rates."""
        yield from self._rounds([self.closed(users) for users in self.users])
        rates = [share * capacity(points) for share in SHARES] if self.auto else self.rates
        opened = [self.poisson(rate) for rate in rates]
        opened += [self.burst(size, every) for size, every in self.bursts]
        if self.trace is not None:
            asks = workload.load_trace(self.trace)
            opened.append((schedule.trace(asks), len(asks)))
        yield from self._rounds(opened)

    def _rounds(self, points: Sequence[tuple[Schedule, int]]) -> Iterator[tuple[Schedule, int]]:
        for start in range(self.repeats):
            yield from (points[(start + place) % len(points)] for place in range(len(points)))


def bounded(count: int) -> int:
    """`count`; raises UserError above MOST_REQUESTS."""
    if count > MOST_REQUESTS:
        raise UserError(
            f"{count:,} requests are too many for one point, at most {MOST_REQUESTS:,}: "
            "shorten --seconds."
        )
    return count


def capacity(points: Sequence[Point]) -> float:
    """The highest throughput of the closed loops, in requests/s. Raises UserError if none of their
    requests succeeded."""
    most = max((metrics.summarize(point, Slo()).request_rate for point in points), default=0.0)
    if most <= 0:
        raise UserError(
            "--rates auto needs the capacity, but no request of the closed loops succeeded: "
            "give the rates as numbers."
        )
    return most


# ---- measuring ----------------------------------------------------------------------------------


async def measure(target: Target, plan: Plan, report: Callable[[Point], object]) -> bool:
    """Measure all points of the plan and pass each to `report`. When cancelled, report what the
    current point has and stop. Returns whether the plan was completed.

    Raises UserError if the server cannot be measured at all.
    """
    points: list[Point] = []
    async with open_session(target) as session:
        name, context = await server.describe(session, target)
        target = replace(target, model=target.model or name)
        longest = context or workload.CONTEXT
        (first,) = plan.make(1, plan.seed, longest)
        check(target, await send(session, target, first, 0.0, asyncio.get_running_loop().time))
    for number, (when, count) in enumerate(plan.schedules(points), 1):
        warmup = plan.warmup if plan.warmup is not None else when.users or WARMUP
        seed = f"{plan.seed} {number}"  # new prompts: a prefix cache has those of the last point
        traced = (
            workload.load_trace(plan.trace, seed) if plan.trace and when.kind == "trace" else []
        )
        asks = plan.make(warmup + (0 if traced else count), seed, longest)
        point = await run_point(
            target,
            asks + traced,
            when,
            workload="trace" if traced else plan.content,
            warmup=warmup,
            seconds=plan.seconds,
            progress=True,
        )
        if when.users and plan.seconds and not plan.requests and len(point.records) == count:
            note(f"{when}: all {count} requests prepared for it were sent before the time was up")
        if point.records:
            points.append(point)
            report(point)
        if point.interrupted:
            return False
    return True


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def check(target: Target, record: Record) -> None:
    """Raise UserError if the first request failed in a way that all others would."""
    if record.failure == REFUSED:
        raise UserError(
            f"{target.url} cannot be reached ({record.detail}): "
            "start the server, or leave --url out to load ours."
        )
    if record.failure in FATAL:
        raise UserError(
            f"{target.url} does not serve completions ({record.failure}: {record.detail}): "
            "fix that first."
        )


# ---- the table ----------------------------------------------------------------------------------

COLUMNS = (
    *(("load", 18), ("requests", 9), ("success", 8), ("req/s", 7), ("tok/s", 8)),
    *(("TTFT p50", 9), ("p95", 7), ("TPOT p50", 9), ("p95", 7), ("ITL p95", 8)),
    *(("E2E p50", 8), ("p95", 7), ("goodput", 8)),
)


def header(limits: Slo) -> str:
    """The lines above the rows."""
    names = "".join(
        f"{name:>{width}}" if number else f"{name:<{width}}"
        for number, (name, width) in enumerate(COLUMNS)
    )
    return (
        "Latencies in ms from the intended start, failures infinite; "
        f"goodput: requests/s within {limits}.\n{names}"
    )


def row(point: Summary) -> str:
    """One row of the table."""

    def ms(name: str, percent: int, adjusted: bool = True) -> str:
        value = point.at(name, percent, adjusted)
        return "-" if value is None else "inf" if math.isinf(value) else f"{value * 1e3:,.0f}"

    cells = (
        f"{point.load:<18}",
        str(point.requests),
        f"{point.success_rate:.1%}",
        f"{point.request_rate:.2f}",
        f"{point.output_rate:,.1f}",
        ms(metrics.TTFT_INTENDED, 50),
        ms(metrics.TTFT_INTENDED, 95),
        ms(metrics.TPOT, 50),
        ms(metrics.TPOT, 95),
        ms(metrics.ITL, 95, adjusted=False),
        ms(metrics.E2E_INTENDED, 50),
        ms(metrics.E2E_INTENDED, 95),
        f"{point.goodput:.2f}",
    )
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def notes(points: Sequence[Summary]) -> Iterator[str]:
    """Lines below the table: failures by kind, and reasons not to trust a point."""
    for point in points:
        failed = [f"{count} {kind}" for kind, count in point.failures.items()]
        if failed or point.flags:
            yield f"{point.load}: {'; '.join([*failed, *point.flags])}"


# ---- the command line ---------------------------------------------------------------------------


def several(kind: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """An argparse type: comma-separated values."""
    return lambda text: tuple(kind(part.strip()) for part in text.split(","))


def rates(text: str) -> object:
    """An argparse type: "auto", or comma-separated rates."""
    return text if text == "auto" else several(cli.number(0, 1e6, above=True))(text)


def burst(text: str) -> tuple[int, float]:
    """An argparse type: "8x2" is eight requests every two seconds."""
    size, _, every = text.partition("x")
    try:
        return cli.whole_number(1, 100_000)(size), cli.number(0, 86_400, above=True)(every)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"invalid burst '{text[:40]}': write 8x2 for eight requests every two seconds"
        ) from None


def slo(text: str) -> Slo:
    """An argparse type: "ttft=1,tpot=0.2", in seconds."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise argparse.ArgumentTypeError(
                f"invalid limits '{text[:40]}': write ttft=1,tpot=0.2,e2e=10 or some of them"
            )
        limits[name] = cli.number(0, 1e6, above=True)(value)
    return Slo(**limits)


def lengths(text: str) -> Lengths:
    """An argparse type: "128", "16:256" or "lognormal:64:0.8"."""
    try:
        return workload.lengths(text.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid lengths '{text[:40]}': write 128, 16:256 for any number between the two, or "
            "lognormal:64:0.8 for a median and a spread"
        ) from None


def key(text: str) -> str:
    """An argparse type: text that is valid in a header."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(
            "the key contains a line end or another control character: remove it"
        )
    return text


def parser() -> cli.Parser:
    parser = cli.Parser(
        MODULE,
        "Stage 07, the load test: load an OpenAI-style server, by default ours, and measure what "
        "its users see.",
        f"  python -m {MODULE}\n"
        f"  python -m {MODULE} --users 1,4,16 --rates auto --out results\n"
        f"  python -m {MODULE} --users 1,8,64 --model gpt2 -- --dtype bfloat16\n"
        f"  python -m {MODULE} --url http://127.0.0.1:8000 --rates 2,4 --seconds 30\n"
        f"Options after -- are passed to our server; see python -m {SERVER} --help",
    )
    _server_arguments(parser.add_argument_group("the server"))
    _load_arguments(parser.add_argument_group("the load, one point of the result per number"))
    _request_arguments(parser.add_argument_group("requests and results"))
    return parser


def _server_arguments(group: Any) -> None:
    group.add_argument(
        "--url",
        type=cli.address,
        help="address of the server; default: start our own, and stop it at the end",
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help="model name on the server, or model that ours loads; default: the server's first",
    )
    group.add_argument(
        "--api-key",
        type=key,
        default=os.environ.get("STAIRCASE_API_KEY", ""),
        metavar="KEY",
        help="default: the environment variable STAIRCASE_API_KEY",
    )
    group.add_argument(
        "--timeout",
        type=cli.number(0, 86_400, above=True),
        default=300.0,
        metavar="S",
        help="seconds after which a request fails",
    )


def _load_arguments(group: Any) -> None:
    group.add_argument(
        "--users",
        type=several(cli.whole_number(1, 10_000)),
        metavar="N,N,...",
        help="closed loops of N users who each wait for their answer; default: "
        f"{','.join(map(str, USERS))}, or none with another load",
    )
    percent = ", ".join(f"{share * 100:g}" for share in SHARES)
    group.add_argument(
        "--rates",
        type=rates,
        default=(),
        metavar="R,R,...",
        help="open loops of R requests per second at random times; "
        f"auto: {percent} %% of the throughput of the closed loops",
    )
    group.add_argument(
        "--bursts",
        type=several(burst),
        default=(),
        metavar="NxS,...",
        help="open loops of N requests at once every S seconds",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="an open loop with the requests of a JSONL file at their times; "
        "with --repeats, its prompts are sent again",
    )
    group.add_argument(
        "--requests",
        type=cli.whole_number(1, 1_000_000),
        metavar="N",
        help=f"requests per point; default: {REQUESTS_A_USER} per user but at least "
        f"{LEAST_REQUESTS}, {OPEN_REQUESTS} in open loops",
    )
    group.add_argument(
        "--seconds",
        type=cli.number(0, 86_400, above=True),
        metavar="S",
        help="send nothing later than S seconds after the start",
    )
    group.add_argument(
        "--warmup",
        type=cli.whole_number(0, 10_000),
        metavar="N",
        help=f"warm-up requests before each point; default: one per user, {WARMUP} in open loops",
    )
    group.add_argument(
        "--repeats",
        type=cli.whole_number(1, 1000),
        default=1,
        metavar="N",
        help="measure every point N times, in rounds that each begin with a different point",
    )


def _request_arguments(group: Any) -> None:
    group.add_argument("--workload", choices=workload.WORKLOADS, default="short", help=WORKLOADS)
    for what in ("prompt", "answer"):
        group.add_argument(
            f"--{what}-tokens",
            type=lengths,
            metavar="N",
            help=f"tokens of each {what}, instead of the workload's: 128 for all; 16:256 for any "
            "number between the two; lognormal:64:0.8 for a median of 64 and a standard deviation "
            "of the logarithm of 0.8, cut to the context",
        )
    group.add_argument(
        "--seed",
        type=cli.whole_number(0, 2**31),
        default=0,
        metavar="N",
        help="seed of prompts and times",
    )
    group.add_argument(
        "--slo",
        type=slo,
        default=Slo(ttft=1.0, tpot=0.2),
        metavar="LIMITS",
        help="limits in seconds for goodput; default: ttft=1,tpot=0.2",
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder to write all requests, the summary and the charts to",
    )


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises UserError as `Plan.check` does."""
    auto = options.rates == "auto"
    opened = options.rates or options.bursts or options.trace
    chosen = {
        "users": options.users or (USERS if auto or not opened else ()),
        "rates": () if auto else options.rates,
        "auto": auto,
    }
    names = (field.name for field in fields(Plan) if field.name not in chosen)
    plan = Plan(**chosen, **{name: getattr(options, name) for name in names})
    plan.check()
    return plan


def server_options(options: argparse.Namespace, plan: Plan, extra: Sequence[str]) -> list[str]:
    """The command line of our server: a queue long enough for all users, and the `extra` ones
    after --."""
    queue = max([QUEUE, *plan.users, *(size for size, _ in plan.bursts)])
    model = ["--model", options.model] if options.model else []
    return ["--max-queue", str(queue), *model, *extra]


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, extra = parser().parse_args(arguments[:split]), arguments[split + 1 :]
    if options.url and extra:
        raise UserError(
            "Options after -- are for our server, but --url names another: leave one of them out."
        )
    plan = plan_of(options)
    if plan.trace and plan.repeats > 1:
        note("each repeat sends the trace's prompts again, and a prefix cache may hold them")
    own_options = None if options.url else server_options(options, plan, extra)
    writer = None
    if options.out:
        writer = results.Writer(
            options.out,
            configuration(options, plan, own_options),
            slo=options.slo,
            seed=options.seed,
            secret=options.api_key,
        )
    summaries: list[Summary] = []

    def report(point: Point) -> None:
        if not summaries:
            print(header(options.slo))
        summaries.append(writer.add(point) if writer else metrics.summarize(point, options.slo))
        print(row(summaries[-1]), flush=True)

    with nullcontext(None) if own_options is None else own_server(own_options) as ours:
        target = Target(
            url=options.url if ours is None else ours.url,
            model=options.model if options.url else None,
            key=options.api_key,
            timeout=options.timeout,
        )
        complete = run(measure(target, plan, report))
    print("\n".join(["", *notes(summaries)]))
    if not (summaries or complete):
        note("interrupted before the first point had an answer: nothing was measured")
    if writer and summaries:
        from . import charts  # matplotlib takes a second to import

        charts.draw(summaries, options.out)
        print(f"Written: {options.out}")
    if not complete:
        raise KeyboardInterrupt
    return 0


def run(measuring: Coroutine[Any, Any, bool]) -> bool:
    """Run `measure` to its end or to Ctrl-C; returns whether it was completed."""
    try:
        return asyncio.run(measuring)
    except KeyboardInterrupt:  # between points
        return False


def configuration(
    options: argparse.Namespace, plan: Plan, own_options: Sequence[str] | None
) -> dict[str, Any]:
    """The options of this run as recorded; `own_options` are those of our server."""
    server = None
    if own_options is not None:
        server = results.without(options.api_key, shlex.join(own_options))
    recorded = {field.name: getattr(plan, field.name) for field in fields(plan)}
    for name in ("trace", "prompt_tokens", "answer_tokens"):
        recorded[name] = None if recorded[name] is None else str(recorded[name])
    fixed = {"url": options.url, "model": options.model, "server": server}
    return fixed | {"timeout": options.timeout} | recorded


if __name__ == "__main__":
    cli.run(main)
