"""Requests to replicas."""

from __future__ import annotations

import aiohttp

CONNECT = 5.0  # seconds until a replica must have accepted a connection


def session() -> aiohttp.ClientSession:
    """The session for all requests to replicas. Each request opens its own connection: the other
    side may have closed one that was kept, which would look like a death."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        auto_decompress=False,
    )


async def whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises ClientPayloadError if it is cut off, or has over `most` bytes."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > most:
            raise aiohttp.ClientPayloadError("the answer is too long")
    return bytes(body)
