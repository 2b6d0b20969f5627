"""What a load test says, worked out from what was written down: formulas only, nothing is sent or read here.

The words are vLLM's (`vllm bench serve`); GLOSSARY says what other tools mean by them. All times are seconds. Latencies are of
the requests that succeeded; in the adjusted percentiles a failure is an answer that never came, so its latency is infinite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .client import HTTP_503, REFUSED, Record
from .load import Point
from .schedule import in_words

PERCENTILES = (50, 90, 95, 99)
P99_SAMPLES = 1000  # fewer say nothing of the slowest hundredth: it would be less than ten of them
CURVE = (
    0,
    1,
    2,
    *range(5, 100, 5),
    98,
    99,
    100,
)  # percentiles that a distribution is drawn by, where it is one of DRAWN

# When a point is not to be trusted.
MOST_CPU = 0.7  # of one core, by the client
MOST_OFF = 0.05  # by which Little's law may miss
LEAST_REQUESTS, LEAST_SECONDS = 100, 30.0  # one of the two
SHORT = "short"  # how the mark of a point that has neither begins
LATE = (
    0.005,
    0.05,
)  # seconds, and share of the median TTFT, by which the client may send late: more than both is too much
LEAST_SAMPLES, SAMPLES_A_STAY = (
    100,
    4,
)  # of the requests in flight, in all and during a mean request

TTFT, TTFT_INTENDED, TPOT, ITL = "ttft", "ttft_intended", "tpot", "itl"
E2E, E2E_INTENDED, CLIENT_QUEUE = "e2e", "e2e_intended", "client_queue"
DRAWN = (TTFT, TTFT_INTENDED, ITL)

GLOSSARY = """\
| here | formula | vLLM `bench serve` | guidellm | aiperf | MLPerf |
|---|---|---|---|---|---|
| TTFT | first chunk - sent | the same | the same | the same | first token - scheduled |
| TTFT, intended | first chunk - intended | | | | the only one |
| TPOT | (E2E - TTFT) / (tokens - 1); not of a single token | the same | `inter_token_latency`; its own \
`time_per_output_token` is E2E / tokens, so the first token counts | ITL, over the \
tokens after the first chunk | mean gap between an answer's tokens |
| ITL | every gap between chunks, of all answers together | the same | | ICL, inter-chunk latency | |
| E2E | last chunk - sent | the same, E2EL | request latency, to the end of the request | request latency | \
last token - scheduled |
| E2E, intended | last chunk - intended | E2EL with the client's queue | scheduled latency | | the only one |
| client queue | sent - intended | client queue time | dispatch delay | | in every latency |
| tokens | as `usage` says | `usage`; else tokenized again | `usage`; else tokenized again | | |
| failures | by kind; infinite in the adjusted percentiles | counted; in no latency | by status | \
infinite in the `adj_` percentiles | |
| goodput | requests/s within every limit, from the intended start | the same, from sending | \
highest load at which 95 % keep the limits | as vLLM | highest Poisson rate whose p99 keeps the limits |"""


# ---- one request ----------------------------------------------------------------------------------------------------


def succeeded(record: Record) -> bool:
    return record.failure is None


def ttft(record: Record) -> float | None:
    """Time to the first token: from sending to the first chunk. None if none came."""
    return record.chunks[0] - record.sent if record.chunks and record.sent is not None else None


def ttft_intended(record: Record) -> float | None:
    """The same from when the request was to start: what its user waited."""
    return record.chunks[0] - record.intended if record.chunks else None


def e2e(record: Record) -> float | None:
    """End to end: from sending to the last chunk."""
    return record.chunks[-1] - record.sent if record.chunks and record.sent is not None else None


def e2e_intended(record: Record) -> float | None:
    return record.chunks[-1] - record.intended if record.chunks else None


def tpot(record: Record) -> float | None:
    """Time per output token after the first, of one request. Several tokens may share a chunk, so they are not counted by chunks.
    None for a single token."""
    if not record.chunks or record.completion_tokens is None or record.completion_tokens < 2:
        return None
    return (record.chunks[-1] - record.chunks[0]) / (record.completion_tokens - 1)


def itl(record: Record) -> list[float]:
    """Inter-token latencies: the gaps between chunks, as they were, even if a chunk brings many tokens."""
    return [later - earlier for earlier, later in pairwise(record.chunks)]


def client_queue(record: Record) -> float | None:
    """How long the client itself kept the request back: none of it is the server's doing."""
    return record.sent - record.intended if record.sent is not None else None


# One value a request, so a failure can stand among them as infinity.
PER_REQUEST: Mapping[str, Callable[[Record], float | None]] = {
    TTFT: ttft, TTFT_INTENDED: ttft_intended, TPOT: tpot, E2E: e2e, E2E_INTENDED: e2e_intended,
}  # fmt: skip


# ---- many of them ---------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank: the least value that so many percent do not exceed. It was measured, and is never one between two, which
    between a latency and infinity would mean nothing. Raises ValueError if there are none."""
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"no {percent:g}th percentile of {len(values)} values")
    return sorted(values)[max(1, math.ceil(percent * len(values) / 100)) - 1]


@dataclass(frozen=True)
class Distribution:
    """Of one latency, in seconds."""

    samples: int
    mean: float
    max: float
    percentiles: dict[str, float | None]  # "p50" and so on; None: p99 of too few samples
    adjusted: (
        dict[str, float | None] | None
    )  # the same with every failure as infinity; None where failures have no place
    curve: list[
        float
    ]  # the values at CURVE, adjusted where failures have a place, of what is drawn; else empty


def distribution(
    values: Sequence[float], failures: int | None, drawn: bool = False
) -> Distribution | None:
    """None if there are no values. `failures` None: they have no place among these values. `drawn`: with the curve."""
    if not values:
        return None
    ordered = sorted(values)
    everyone = ordered + [math.inf] * (failures or 0)
    adjusted = None if failures is None else _percentiles(everyone)
    curve = [percentile(everyone, percent) for percent in CURVE] if drawn else []
    return Distribution(
        len(values),
        math.fsum(values) / len(values),
        ordered[-1],
        _percentiles(ordered),
        adjusted,
        curve,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    enough = len(values) >= P99_SAMPLES
    return {
        f"p{each}": percentile(values, each) if each < 99 or enough else None
        for each in PERCENTILES
    }


def latencies(records: Sequence[Record]) -> dict[str, Distribution]:
    """Every latency that has values, by name."""
    good = [record for record in records if succeeded(record)]
    failures = len(records) - len(good)
    found = {
        name: distribution(_values(good, of), failures, name in DRAWN)
        for name, of in PER_REQUEST.items()
    }
    found[ITL] = distribution([gap for record in good for gap in itl(record)], None, ITL in DRAWN)
    found[CLIENT_QUEUE] = distribution(
        _values(records, client_queue), None
    )  # a request that failed had to wait as well
    return {name: each for name, each in found.items() if each is not None}


def _values(records: Sequence[Record], of: Callable[[Record], float | None]) -> list[float]:
    return [value for value in map(of, records) if value is not None]


# ---- limits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slo:
    """What a user is promised, in seconds; None promises nothing. TTFT and E2E latency count from the intended start."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        named = {"TTFT": self.ttft, "TPOT": self.tpot, "E2E": self.e2e}
        return (
            ", ".join(
                f"{name} {limit * 1e3:,.0f} ms"
                for name, limit in named.items()
                if limit is not None
            )
            or "no limits"
        )


def meets(record: Record, slo: Slo) -> bool:
    """Whether the request succeeded within every limit. A single token has no TPOT, and so keeps any."""
    measured = (
        (ttft_intended(record), slo.ttft),
        (tpot(record), slo.tpot),
        (e2e_intended(record), slo.e2e),
    )
    return succeeded(record) and all(
        value is None or limit is None or value <= limit for value, limit in measured
    )


def goodput(records: Sequence[Record], slo: Slo, seconds: float) -> float:
    """Requests/s that met every limit."""
    return sum(meets(record, slo) for record in records) / seconds


# ---- trust ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Little:
    """Little's law, L = lambda W: the mean number of requests in flight is their rate of arrival times their mean stay.

    From empty to empty it holds for any load, steady or not. So where it fails, the ruler is wrong: requests that nobody wrote
    down, or times that are not those that passed.
    """

    in_flight: float  # L, from samples taken while the load ran
    arrivals: float  # lambda, requests/s, from the records
    stay: float  # W, seconds from sending to the end, from the records

    @property
    def ratio(self) -> float:
        return self.in_flight / (self.arrivals * self.stay)


def little(
    records: Sequence[Record], in_flight: Sequence[tuple[float, int]], seconds: float
) -> Little | None:
    """`in_flight`: (when, how many), each until the next, over all `seconds`. None if the samples are too few to judge by: with
    `LEAST_SAMPLES`, and `SAMPLES_A_STAY` of them in a request's stay, the mean is off by about 2 %."""
    stays = [record.end - record.sent for record in records if record.sent is not None]
    if not stays or len(in_flight) < LEAST_SAMPLES:
        return None
    stay = math.fsum(stays) / len(stays)
    if stay <= 0 or seconds / len(in_flight) * SAMPLES_A_STAY > stay:
        return None
    # By time and not by number: where the client was held up, samples are late and close together.
    ends = [*(at for at, _ in in_flight[1:]), seconds]
    total = math.fsum(count * (end - at) for (at, count), end in zip(in_flight, ends, strict=True))
    return Little(total / (seconds - in_flight[0][0]), len(stays) / seconds, stay)


@dataclass(frozen=True)
class Steady:
    """The middle of a point: from when the load was whole, to when the last request was sent and it began to run dry."""

    start: float  # seconds
    end: float
    output_rate: float  # tokens/s that arrived in between, those of requests that failed later too

    @property
    def seconds(self) -> float:
        return self.end - self.start


def steady(records: Sequence[Record], users: int | None) -> Steady | None:
    """A closed loop is whole when each of its users has sent, an open one when the first request has ended. None if nothing was
    sent after that."""
    sent = sorted(record.sent for record in records if record.sent is not None)
    if len(sent) < 2 or (users is not None and len(sent) <= users):
        return None
    start, end = (
        sent[users - 1] if users is not None else min(record.end for record in records),
        sent[-1],
    )
    if end <= start:
        return None
    tokens = sum(count for at, count in _arrivals(records) if start < at <= end)
    return Steady(start, end, tokens / (end - start))


def _arrivals(records: Sequence[Record]) -> Iterator[tuple[float, int]]:
    """When how many tokens came."""
    for record in records:
        yield from zip(record.chunks, record.chunk_tokens, strict=True)


# ---- a point --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What one point says. Rates are per second of `seconds`, and of requests that succeeded."""

    workload: str
    kind: str  # of the schedule
    users: int | None  # of a closed loop
    rate: float | None  # requests/s that an open loop offered
    requests: int
    succeeded: int
    failures: dict[str, int]  # by kind
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    request_rate: float
    output_rate: float  # tok/s
    total_rate: float  # tok/s, prompts too
    steady: Steady | None
    latency: dict[str, Distribution]  # by name; absent if it has no values
    slo: Slo
    goodput: float  # requests/s
    client_cpu: float  # share of one core
    little: Little | None
    received_tokens: int  # of answers, those that failed too
    server_tokens: int | None  # what the server says that it generated; None: it does not say
    tokens_match: bool | None  # whether that is what the client received; None: nobody can say
    blocks_back: bool | None
    flags: list[str] = field(default_factory=list)  # why the point is not to be trusted

    @property
    def success_rate(self) -> float:
        return self.succeeded / self.requests

    @property
    def load(self) -> str:
        """In words."""
        return in_words(self.kind, self.users, self.rate)

    def at(self, name: str, percent: int, adjusted: bool = False) -> float | None:
        """A percentile of PERCENTILES of a latency, in seconds; None if there is none."""
        found = self.latency.get(name)
        if found is None:  # nothing succeeded
            return math.inf if adjusted and name in PER_REQUEST and self.succeeded == 0 else None
        table = found.adjusted if adjusted else found.percentiles
        return None if table is None else table[f"p{percent}"]


def summarize(point: Point, slo: Slo) -> Summary:
    """Raises ValueError for a point without requests."""
    records, server = point.records, point.server
    if not records or point.duration <= 0:
        raise ValueError("a point without requests says nothing")
    good = [record for record in records if succeeded(record)]
    prompts = sum(record.prompt_tokens or 0 for record in good)
    answers = sum(record.completion_tokens or 0 for record in good)
    seconds, users = point.duration, point.schedule.users
    found = Summary(
        workload=point.workload,
        kind=point.schedule.kind,
        users=users,
        rate=point.schedule.rate,
        requests=len(records),
        succeeded=len(good),
        failures=dict(
            sorted(
                Counter(record.failure for record in records if record.failure is not None).items()
            )
        ),
        seconds=seconds,
        prompt_tokens=prompts,
        completion_tokens=answers,
        request_rate=len(good) / seconds,
        output_rate=answers / seconds,
        total_rate=(prompts + answers) / seconds,
        steady=None if point.schedule.kind == "bursts" else steady(records, users),
        latency=latencies(records),
        slo=slo,
        goodput=goodput(records, slo, seconds),
        client_cpu=point.client_cpu,
        little=None if point.interrupted else little(records, point.in_flight, seconds),
        received_tokens=received_tokens(records),
        server_tokens=server.generation_tokens if server else None,
        tokens_match=tokens_match(records, server.generation_tokens) if server else None,
        blocks_back=server.idle if server else None,
    )
    found.flags.extend(_flags(found, point.interrupted))
    return found


def received_tokens(records: Sequence[Record]) -> int:
    """By `usage`; where an answer broke off before it, by what its chunks brought."""
    return sum(
        sum(record.chunk_tokens) if record.completion_tokens is None else record.completion_tokens
        for record in records
    )


def tokens_match(records: Sequence[Record], server_tokens: int) -> bool | None:
    """Whether the client received exactly the tokens that the server counts. None if they differ and some answer broke off: how
    much of it the server computed, nobody told the client. Where it did not begin, it computed nothing."""
    if received_tokens(records) == server_tokens:
        return True
    broke_off = any(
        record.completion_tokens is None and record.failure not in (REFUSED, HTTP_503)
        for record in records
    )
    return None if broke_off else False


def _flags(point: Summary, interrupted: bool) -> Iterator[str]:
    """Why a point is not to be trusted. That requests failed is no reason: it is a result."""
    if interrupted:
        yield "interrupted"
    if point.client_cpu > MOST_CPU:
        yield f"client took {point.client_cpu:.0%} of a core"
    late, first = point.at(CLIENT_QUEUE, 95), point.at(TTFT, 50)
    if late is not None and late > max(LATE[0], LATE[1] * (first or 0.0)):
        yield f"client sent {late * 1e3:,.0f} ms late (p95)"
    if point.little is not None and abs(point.little.ratio - 1) > MOST_OFF:
        yield f"Little's law off by {abs(point.little.ratio - 1):.0%}"
    if point.tokens_match is False:
        yield f"tokens differ: server {point.server_tokens:,}, client {point.received_tokens:,}"
    if point.blocks_back is False:
        yield "server not idle afterwards"
    if point.requests < LEAST_REQUESTS and point.seconds < LEAST_SECONDS:
        yield f"{SHORT}: {point.requests} requests in {point.seconds:,.0f} s"


# ---- several points -------------------------------------------------------------------------------------------------


def knee(points: Sequence[Summary]) -> Summary | None:
    """Where a server does most for what its users wait: the point with the greatest throughput over mean E2E latency, from the
    intended start (Kleinrock's power). Below it, more load costs little waiting; above it, more waiting buys little throughput.
    None if no point has a latency."""
    measured = [point for point in points if E2E_INTENDED in point.latency]
    return max(
        measured,
        key=lambda point: point.request_rate / point.latency[E2E_INTENDED].mean,
        default=None,
    )
