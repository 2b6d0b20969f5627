"""The server as seen from outside: its counters, its model's name, and whether it is idle."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .client import Target

PATIENCE = 10.0  # seconds that a server has to become idle
POLL = 0.05  # seconds between two looks at it
ANSWERING = 30.0  # seconds for /metrics and /v1/models


@dataclass(frozen=True)
class Counters:
    """The values of /metrics under vLLM's names, summed over labels: totals since the server's
    start, and the current state."""

    generation_tokens: int
    success: int  # requests that ended, for any reason
    running: int
    waiting: int
    kv_cache_usage: float  # share of the blocks that are owned, from 0 to 1

    @property
    def idle(self) -> bool:
        """Whether nothing runs, nothing waits, and no block is owned."""
        return not (self.running or self.waiting or self.kv_cache_usage)

    def since(self, before: Counters) -> Counters:
        """Totals from `before` on, and the states of now."""
        tokens = self.generation_tokens - before.generation_tokens
        return replace(self, generation_tokens=tokens, success=self.success - before.success)


NAMES = {
    "generation_tokens": "vllm:generation_tokens_total",
    "success": "vllm:request_success_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}


def parse(text: str) -> Counters | None:
    """The counters in the text of /metrics; None if it is not in Prometheus format, or a counter is
    missing or not finite."""
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    values = {field: sums.get(name, math.nan) for field, name in NAMES.items()}
    if not all(map(math.isfinite, values.values())):
        return None
    usage = values.pop("kv_cache_usage")
    return Counters(**{field: int(value) for field, value in values.items()}, kv_cache_usage=usage)


async def scrape(session: aiohttp.ClientSession, target: Target) -> Counters | None:
    """The server's counters now; None if it has no known ones, or does not answer."""
    try:
        async with asyncio.timeout(ANSWERING), session.get(f"{target.url}/metrics") as response:
            return parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, UnicodeDecodeError):  # OSError: TimeoutError too
        return None


async def settled(session: aiohttp.ClientSession, target: Target) -> Counters | None:
    """The counters once the server is idle, or as they are after PATIENCE seconds; None as in
    `scrape`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        counters = await scrape(session, target)
        if counters is None or counters.idle or time.monotonic() > deadline:
            return counters
        await asyncio.sleep(POLL)


async def describe(session: aiohttp.ClientSession, target: Target) -> tuple[str | None, int | None]:
    """The name of the server's first model and its context in tokens (vLLM's `max_model_len`); None
    for what is missing."""
    try:
        async with asyncio.timeout(ANSWERING), session.get(f"{target.url}/v1/models") as response:
            card = (await response.json(content_type=None))["data"][0]
        name, context = card["id"], card.get("max_model_len")
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, None
    return name if isinstance(name, str) else None, context if isinstance(context, int) else None
