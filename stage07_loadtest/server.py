"""The server as seen from outside: its counters, what it calls its model, and whether it has come to rest."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .client import Target

PATIENCE = 10.0  # seconds for a server to come to rest
POLL = 0.05  # seconds between two looks at it
ANSWERING = 30.0  # seconds for /metrics and /v1/models


@dataclass(frozen=True)
class Counters:
    """What /metrics says, under vLLM's names, added up over labels: totals since the server's start, and the state now."""

    prompt_tokens: int
    generation_tokens: int
    success: int  # requests that ended, for whatever reason
    running: int
    waiting: int
    kv_cache_usage: float  # share of the blocks that are owned, from 0 to 1

    @property
    def idle(self) -> bool:
        """Whether everything came back: nothing runs, nothing waits, no block is owned."""
        return not (self.running or self.waiting or self.kv_cache_usage)


NAMES = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "success": "vllm:request_success_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}


def parse(text: str) -> Counters | None:
    """The counters in what /metrics answered; None if one of them is missing or not finite, or it is no such text."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    if not all(math.isfinite(found.get(name, math.nan)) for name in NAMES.values()):
        return None
    values = {field: found[name] for field, name in NAMES.items()}
    return Counters(
        **{
            field: value if field == "kv_cache_usage" else int(value)
            for field, value in values.items()
        }
    )  # type: ignore[arg-type]


async def scrape(session: aiohttp.ClientSession, target: Target) -> Counters | None:
    """The server's counters now; None if it has none that we know, or does not answer."""
    try:
        async with asyncio.timeout(ANSWERING), session.get(f"{target.url}/metrics") as response:
            return parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, UnicodeDecodeError):  # OSError: TimeoutError too
        return None


async def settled(
    session: aiohttp.ClientSession, target: Target, patience: float = PATIENCE
) -> Counters | None:
    """The counters as soon as nothing is in hand, or as they are after `patience` seconds. None as `scrape`."""
    deadline = time.monotonic() + patience
    while True:
        found = await scrape(session, target)
        if found is None or found.idle or time.monotonic() > deadline:
            return found
        await asyncio.sleep(POLL)


async def describe(session: aiohttp.ClientSession, target: Target) -> tuple[str | None, int | None]:
    """What the server calls its first model, and its context in tokens (vLLM's `max_model_len`): None where it does not say."""
    try:
        async with asyncio.timeout(ANSWERING), session.get(f"{target.url}/v1/models") as response:
            card = (await response.json(content_type=None))["data"][0]
        name, context = card["id"], card.get("max_model_len")
    except (
        aiohttp.ClientError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ):
        return None, None
    return name if isinstance(name, str) else None, context if isinstance(context, int) else None
