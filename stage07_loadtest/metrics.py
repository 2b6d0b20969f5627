"""The results of a load test, computed from its records: formulas only, no input and no output.

The terms are vLLM's (`vllm bench serve`); REPORT.md compares them with other tools'. All times are
seconds. Latencies are those of requests that succeeded; in the adjusted percentiles a failure is an
answer that never arrived, so its latency is infinite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .client import HTTP_503, REFUSED, Record
from .load import Point

PERCENTILES = (50, 90, 95, 99)
P99_SAMPLES = 1000  # fewer have less than ten values in the slowest hundredth

# Thresholds of the flags that mark a point as not to be trusted.
MOST_CPU = 0.7  # of one core, by the client
MOST_OFF = 0.05  # relative error of Little's law
LEAST_REQUESTS, LEAST_SECONDS = 100, 30.0  # one of the two is enough
LATE = (0.005, 0.05)  # seconds, and share of the median TTFT: sending late by more than both
LEAST_SAMPLES, SAMPLES_A_STAY = 100, 4  # of the requests in flight: in all, and per mean request

TTFT, TTFT_INTENDED, TPOT, ITL = "ttft", "ttft_intended", "tpot", "itl"
E2E, E2E_INTENDED, CLIENT_QUEUE = "e2e", "e2e_intended", "client_queue"


# ---- one request --------------------------------------------------------------------------------


def succeeded(record: Record) -> bool:
    return record.failure is None


def ttft(record: Record) -> float | None:
    """Time to first token: from sending to the first chunk. None without a chunk."""
    return record.chunks[0] - record.sent if record.chunks and record.sent is not None else None


def ttft_intended(record: Record) -> float | None:
    """Time to first token from the intended start: what the user waited."""
    return record.chunks[0] - record.intended if record.chunks else None


def e2e(record: Record) -> float | None:
    """End-to-end latency: from sending to the last chunk. None without a chunk."""
    return record.chunks[-1] - record.sent if record.chunks and record.sent is not None else None


def e2e_intended(record: Record) -> float | None:
    """End-to-end latency from the intended start."""
    return record.chunks[-1] - record.intended if record.chunks else None


def tpot(record: Record) -> float | None:
    """Time per output token after the first. Tokens are counted by `usage`, because a chunk may
    hold several. None for a single token."""
    if not record.chunks or record.completion_tokens is None or record.completion_tokens < 2:
        return None
    return (record.chunks[-1] - record.chunks[0]) / (record.completion_tokens - 1)


def itl(record: Record) -> list[float]:
    """Inter-token latencies: the gaps between chunks, however many tokens each holds."""
    return [later - earlier for earlier, later in pairwise(record.chunks)]


def client_queue(record: Record) -> float | None:
    """How late the client sent the request, which the server cannot have caused."""
    return record.sent - record.intended if record.sent is not None else None


# Latencies with one value per request, where a failure counts as infinity.
PER_REQUEST: Mapping[str, Callable[[Record], float | None]] = {
    TTFT: ttft,
    TTFT_INTENDED: ttft_intended,
    TPOT: tpot,
    E2E: e2e,
    E2E_INTENDED: e2e_intended,
}


# ---- many requests ------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank: the least value that at least `percent` % of the values do not exceed.

    It is a measured value: an interpolation between a latency and infinity would mean nothing.
    Raises ValueError without values, and for a percent outside 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent:g} of {len(values)} values is undefined")
    return sorted(values)[max(1, math.ceil(percent * len(values) / 100)) - 1]


@dataclass(frozen=True)
class Distribution:
    """The values of one latency, in seconds."""

    samples: int
    percentiles: dict[str, float | None]  # "p50" and so on; None: p99 of too few samples
    adjusted: dict[str, float | None] | None  # failures as infinity; None for ITL, client queue


def distribution(values: Sequence[float], failures: int | None) -> Distribution | None:
    """Summarize `values`; None if there are none. `failures`: the number that count as infinity in
    the adjusted percentiles; None for a latency without those."""
    if not values:
        return None
    with_failures = [*values] + [math.inf] * (failures or 0)
    adjusted = None if failures is None else _percentiles(with_failures)
    return Distribution(len(values), _percentiles(values), adjusted)


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    enough = len(values) >= P99_SAMPLES
    return {
        f"p{percent}": percentile(values, percent) if percent < 99 or enough else None
        for percent in PERCENTILES
    }


def latencies(records: Sequence[Record]) -> dict[str, Distribution]:
    """Every latency that has values, by name."""
    good = [record for record in records if succeeded(record)]
    failures = len(records) - len(good)
    by_name = {name: distribution(_values(good, of), failures) for name, of in PER_REQUEST.items()}
    by_name[ITL] = distribution([gap for record in good for gap in itl(record)], None)
    # Failed requests were sent late too.
    by_name[CLIENT_QUEUE] = distribution(_values(records, client_queue), None)
    return {name: values for name, values in by_name.items() if values is not None}


def _values(records: Sequence[Record], of: Callable[[Record], float | None]) -> list[float]:
    return [value for value in map(of, records) if value is not None]


# ---- limits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slo:
    """Limits for one request, in seconds; None: no limit. TTFT and E2E latency count from the
    intended start."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft, "TPOT": self.tpot, "E2E": self.e2e}
        texts = [f"{name} {1e3 * limit:,.0f} ms" for name, limit in limits.items() if limit]
        return ", ".join(texts) or "no limits"


def meets(record: Record, slo: Slo) -> bool:
    """Whether the request succeeded within every limit. A single token has no TPOT and meets any
    limit on it."""
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


# ---- trust --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Little:
    """Little's law, L = lambda W: the mean number of requests in flight is their rate of arrival
    times their mean stay.

    From empty to empty it holds for any load, steady or not. Where it fails, the measurement is
    wrong: requests are missing from the records, or their times are.
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
    """Little's law for a point of `seconds`. `in_flight`: (time, requests in flight), each valid
    until the next.

    None for too few samples: with `LEAST_SAMPLES`, and `SAMPLES_A_STAY` of them in a request's
    stay, the mean is off by about 2 %.
    """
    stays = [record.end - record.sent for record in records if record.sent is not None]
    if not stays or len(in_flight) < LEAST_SAMPLES:
        return None
    stay = math.fsum(stays) / len(stays)
    if stay <= 0 or seconds / len(in_flight) * SAMPLES_A_STAY > stay:
        return None
    # Weighted by time: where the client was held up, samples are late and close together.
    ends = [*(at for at, _ in in_flight[1:]), seconds]
    total = math.fsum(count * (end - at) for (at, count), end in zip(in_flight, ends, strict=True))
    return Little(total / (seconds - in_flight[0][0]), len(stays) / seconds, stay)


# ---- a point ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The results of one point. Rates are of requests that succeeded, per second of `seconds`."""

    load: str  # a short name of the schedule
    requests: int
    succeeded: int
    failures: dict[str, int]  # by kind
    seconds: float
    completion_tokens: int
    request_rate: float
    output_rate: float  # tok/s
    latency: dict[str, Distribution]  # by name; absent if it has no values
    goodput: float  # requests/s
    client_cpu: float  # share of one core
    little: Little | None
    received_tokens: int  # of answers, failed ones included
    server_tokens: int | None  # generated, by the server's counters; None: it has none
    tokens_match: bool | None  # client and server agree; None: unknown
    blocks_back: bool | None
    flags: list[str] = field(default_factory=list)  # reasons not to trust the point

    @property
    def success_rate(self) -> float:
        return self.succeeded / self.requests

    def at(self, name: str, percent: int, adjusted: bool = False) -> float | None:
        """One of PERCENTILES of a latency, in seconds; None if it was not measured."""
        values = self.latency.get(name)
        if values is None:
            return math.inf if adjusted and name in PER_REQUEST and self.succeeded == 0 else None
        table = values.adjusted if adjusted else values.percentiles
        return None if table is None else table[f"p{percent}"]


def summarize(point: Point, slo: Slo) -> Summary:
    """Raises ValueError for a point without requests."""
    records, server = point.records, point.server
    if not records or point.duration <= 0:
        raise ValueError("a point without requests cannot be summarized")
    good = [record for record in records if succeeded(record)]
    failures = Counter(record.failure for record in records if record.failure is not None)
    answers, seconds = sum(record.completion_tokens or 0 for record in good), point.duration
    summary = Summary(
        load=str(point.schedule),
        requests=len(records),
        succeeded=len(good),
        failures=dict(sorted(failures.items())),
        seconds=seconds,
        completion_tokens=answers,
        request_rate=len(good) / seconds,
        output_rate=answers / seconds,
        latency=latencies(records),
        goodput=goodput(records, slo, seconds),
        client_cpu=point.client_cpu,
        little=None if point.interrupted else little(records, point.in_flight, seconds),
        received_tokens=received_tokens(records),
        server_tokens=server.generation_tokens if server else None,
        tokens_match=tokens_match(records, server.generation_tokens) if server else None,
        blocks_back=server.idle if server else None,
    )
    summary.flags.extend(_flags(summary, point.interrupted))
    return summary


def received_tokens(records: Sequence[Record]) -> int:
    """Tokens by `usage`, or by chunks where an answer broke off before it."""
    return sum(
        sum(record.chunk_tokens) if record.completion_tokens is None else record.completion_tokens
        for record in records
    )


def tokens_match(records: Sequence[Record], server_tokens: int) -> bool | None:
    """Whether the client received exactly the tokens that the server counts.

    None if they differ and an answer broke off, since the server may have computed tokens that were
    lost with it. A request that was rejected before it began cannot explain a difference.
    """
    if received_tokens(records) == server_tokens:
        return True
    broke_off = any(
        record.completion_tokens is None and record.failure not in (REFUSED, HTTP_503)
        for record in records
    )
    return None if broke_off else False


def _flags(point: Summary, interrupted: bool) -> Iterator[str]:
    """Reasons not to trust a point. Failures are not one of them: they are a result."""
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
        yield f"short: {point.requests} requests in {point.seconds:,.0f} s"
