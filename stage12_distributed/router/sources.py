"""Where the addresses of running servers come from: the command line, files, and DNS.

http://10.0.0.1:8000      an address
file:backends.txt         a file with an address per line, read again and again
dns:engines.local:8000    all addresses of a name, looked up again and again
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from shared import cli
from shared.files import read_text

log = logging.getLogger(__name__)
Find = Callable[[], Awaitable[Collection[str]]]  # the addresses of all servers
LARGEST_FILE = 2**20  # bytes
MOST_SERVERS = 1_000  # of a source: more would be checked too seldom
# Not the event loop's threads, which look up names: a name server that is away holds all of them.
FILES = ThreadPoolExecutor(1, "sources")


def source(text: str) -> str:
    """An argparse type: where addresses come from, in one of the three forms above."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return text
    if kind == "dns":
        cli.address(f"http://{rest}")
        host, _, port = rest.rpartition(":")
        if host and port.isdecimal():
            return text
        raise argparse.ArgumentTypeError(f"invalid name '{text[:80]}': write dns:NAME:PORT")
    return cli.address(text)


class Sources:
    """All sources of a router. Calling it returns the current addresses.

    A source that fails, or lists nothing, keeps its addresses of before: a file that is being
    written, or a name server that is away, must not take all servers from the router.

    fixed: addresses that stand for themselves; an administrator may add and remove them.
    """

    def __init__(self, texts: Sequence[str], find: Find | None = None) -> None:
        self.fixed = list(dict.fromkeys(text for text in texts if text.startswith("http")))
        self.lists = {text: reader(text) for text in texts if text not in self.fixed}
        if find:
            self.lists["the list"] = find
        self.listed: dict[str, Collection[str]] = {}

    async def __call__(self) -> list[str]:
        for name, find in self.lists.items():
            try:
                listed = await find() or self.listed.get(name, ())
                if len(listed) > MOST_SERVERS:
                    raise ValueError(
                        f"{len(listed)} servers, and at most {MOST_SERVERS} are allowed"
                    )
                self.listed[name] = listed
            except Exception as error:  # of whatever finds them
                log.warning("%s: the known servers stay: %s", name, str(error)[:200])
        return list(dict.fromkeys(chain(self.fixed, *map(sorted, self.listed.values()))))


def reader(text: str) -> Find:
    """What returns the current addresses of a file or a name."""
    kind, _, rest = text.partition(":")
    if kind == "file":
        return partial(from_path, Path(rest))
    host, _, port = rest.rpartition(":")
    return partial(from_dns, host.strip("[]"), int(port))


async def from_path(path: Path) -> set[str]:
    return await asyncio.get_running_loop().run_in_executor(FILES, from_file, path)


def from_file(path: Path) -> set[str]:
    """The addresses in a file, one per line; "#" begins a comment. Raises ArgumentTypeError for a
    line that is no address, OSError, UnicodeDecodeError."""
    text = read_text(path, LARGEST_FILE)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {cli.address(line) for line in lines if line}


async def from_dns(host: str, port: int) -> set[str]:
    """The addresses behind a name. Raises OSError if it has none."""
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    names = {str(address[0]) for *_, address in entries}
    return {f"http://{f'[{name}]' if ':' in name else name}:{port}" for name in names}
