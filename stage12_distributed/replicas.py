"""The servers behind the router: processes of its own, or addresses that it was given.

Only this file decides which of them may be chosen. A server is in the policy from its first good
health check to its death. A health check never touches the load: requests at a server that answers
slowly are still in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any

import aiohttp

from shared.errors import UserError
from shared.paths import ROOT
from shared.server import READY, STARTING, STOPPING

from .routing import BLOCK_SIZE, Replica, Routing

log = logging.getLogger(__name__)
CHECK = 1.0  # seconds between two health checks
PATIENCE = 5.0  # seconds that a health check may take
MISSES = 3  # unanswered checks, after which a process is started again
BACKOFF = 0.5  # seconds until a server gets another chance, doubled each time
LONGEST_BACKOFF = 30.0
STEADY = 10.0  # seconds that a process must have lived to be started again at once
POLL = 0.02  # seconds between two looks at the requests of a server that drains
LONGEST_LINE = 2**20  # bytes of a log
LARGEST_LIST = 2**20  # bytes of a list of models
Find = Callable[[], Awaitable[Collection[str]]]  # the addresses of all servers


@dataclass(frozen=True)
class Options:
    """What the command line says.

    backends: addresses of servers that run already; find: returns the current addresses, if they
        change. Without both, the router starts `replicas` servers of stage 06 with `arguments`, and
        restarts any that end.
    keys: that clients must send; the servers require the first one, if any.
    """

    backends: tuple[str, ...] = ()
    find: Find | None = None
    replicas: int = 2
    arguments: tuple[str, ...] = ()
    block_size: int = BLOCK_SIZE
    timeout: float = 300.0
    grace: float = 10.0
    hosts: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    admin_key: str = ""


@dataclass(eq=False)
class Backend:
    """A server behind the router.

    replica: in the policy; None while the server starts, is dead, or has another model.
    why: the reason that it gets no requests, for people.
    failures: in a row. Each doubles the time `until` which the server gets no other chance. They
        outlive the request that met them.
    """

    name: str
    url: str = ""
    own: bool = False  # a process that was started here
    process: Process | None = None
    replica: Replica | None = None
    why: str = "it is starting"
    draining: bool = False
    failures: int = 0
    until: float = 0.0
    misses: int = 0
    keeping: asyncio.Task[None] | None = None
    showing: asyncio.Task[None] | None = None  # its log

    @property
    def ready(self) -> bool:
        return self.replica is not None and self.replica.ready

    def about(self) -> dict[str, Any]:
        """For /health."""
        replica = self.replica
        load = {"requests": replica.requests, "tokens": replica.tokens} if replica else {}
        return {"ready": self.ready, **({} if self.ready else {"why": self.why}), **load}


class Pool:
    """All backends, and the policy that chooses among them.

    session: for all requests to servers; set it before `start`.
    """

    session: aiohttp.ClientSession

    def __init__(self, options: Options) -> None:
        self.options, self.routing = options, Routing(options.block_size)
        key = next(iter(options.keys), "")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = ""  # that all servers must have: the first one's
        self.restarts = 0
        self._numbers = count()
        self._updating = asyncio.Lock()
        self._checking: asyncio.Task[None] | None = None
        self.backends: dict[str, Backend] = {}
        for url in options.backends:
            self._add(url)
        for _ in range(0 if options.backends or options.find else options.replicas):
            self._add(own=True)

    async def start(self) -> None:
        """Start the processes, and check all servers. Raises UserError if a process of our own does
        not start; a given address may be dead now and alive later."""
        await asyncio.gather(*(self._start(one) for one in self._all() if one.own))
        await self._look()
        self._checking = asyncio.create_task(self._check_all())

    async def stop(self) -> None:
        """End all processes."""
        if self._checking:
            self._checking.cancel()
        await asyncio.gather(*(self._end(backend) for backend in self.backends.values()))

    # ---- who may be chosen ----------------------------------------------------------------------

    def served(self, replica: Replica) -> None:
        """Forgive earlier failures, because the replica has answered."""
        if backend := self._backend(replica):
            backend.failures = 0

    def failed(self, replica: Replica, error: Exception) -> None:
        """Remove a replica that a request found dead. No other request must find that out again, so
        it leaves the policy at once, with everything remembered of its cache."""
        if backend := self._backend(replica):
            log.warning("%s: %s", backend.name, str(error)[:200])
            self._lose(backend, f"a request failed on it ({type(error).__name__})")

    def _backend(self, replica: Replica) -> Backend | None:
        backend = self.backends.get(replica.name)
        return backend if backend and backend.replica is replica else None

    def _lose(self, backend: Backend, why: str) -> None:
        if backend.replica is not None:
            log.warning("%s is lost: %s", backend.name, why)
            wait = min(LONGEST_BACKOFF, BACKOFF * 2**backend.failures)
            backend.until = asyncio.get_running_loop().time() + wait
            backend.failures += 1
            self.routing.remove(backend.name)
        backend.replica, backend.why = None, why

    async def _check_all(self) -> None:
        while True:
            await asyncio.sleep(CHECK)
            await self._look()

    async def _look(self) -> None:
        """Find the current servers, and check them all."""
        if self.options.find:
            try:
                await self._follow(await self.options.find())
            except Exception as error:  # of whatever finds them; the known servers stay
                log.warning("the servers cannot be listed: %s", str(error)[:200])
        checks = [self.check(one) for one in self._all() if one.url]
        for failed in await asyncio.gather(*checks, return_exceptions=True):
            if failed:  # a defect: the next checks must still run
                log.error("a health check failed", exc_info=failed)

    async def _follow(self, urls: Collection[str]) -> None:
        """Replace the servers by these. Requests in flight continue."""
        for backend in self._all():
            if backend.url not in urls:
                await self._remove(backend)
        for url in sorted({*urls} - {backend.url for backend in self._all()}):
            self._add(url)

    def _all(self) -> list[Backend]:
        return list(self.backends.values())

    async def check(self, backend: Backend) -> None:
        """Check a server's health, and let it in or shut it out."""
        url = backend.url
        try:
            async with asyncio.timeout(PATIENCE):
                status = await self._status(backend, "/ready")
                if status == 404:  # not one of ours
                    status = await self._status(backend, "/health")
                if status == 200 and backend.replica is None:
                    await self._let_in(backend)
        except TimeoutError:
            backend.misses += 1
            status = 0
            if backend.misses >= MISSES and backend.process:
                self._lose(backend, f"it has not answered {MISSES} health checks")
                with contextlib.suppress(ProcessLookupError):
                    backend.process.kill()
        except (aiohttp.ClientError, OSError) as error:
            if backend.url == url:  # else this was the process before
                self._lose(backend, f"it cannot be reached ({type(error).__name__})")
            return
        else:
            backend.misses = 0
        if backend.replica is not None:
            backend.replica.ready = status == 200 and not backend.draining
            if not backend.ready:
                backend.why = f"its health check gave status {status}" if status else "it is slow"
                backend.why = "it is draining" if backend.draining else backend.why

    def get(self, backend: Backend, path: str) -> AbstractAsyncContextManager[Any]:
        """A request of our own."""
        return self.session.get(backend.url + path, headers=self.headers)

    async def _status(self, backend: Backend, path: str) -> int:
        async with self.get(backend, path) as response:
            return int(response.status)

    async def _let_in(self, backend: Backend) -> None:
        """Add it to the policy, if it has the same model as the others."""
        async with self.get(backend, "/v1/models") as response:
            try:
                found = json.loads(await whole(response, LARGEST_LIST))
                model = str(found["data"][0]["id"])
            except (LookupError, TypeError, ValueError, RecursionError):
                backend.why = "it has no list of models at /v1/models"
                return
        now = asyncio.get_running_loop().time()
        self.model = self.model or model
        if model != self.model:
            why = f"it serves the model {model[:80]!r}, not {self.model[:80]!r} like the others"
            if backend.why != why:
                log.warning("%s gets no requests: %s", backend.name, why)
            backend.why = why
        elif now >= backend.until and not backend.draining and backend.replica is None:
            backend.replica = self.routing.add(backend.name)

    # ---- drain and update -----------------------------------------------------------------------

    async def drain(self, backend: Backend, grace: float) -> bool:
        """Send it no more requests, and wait for those in flight. Returns whether they ended in
        time."""
        backend.draining = True
        replica, end = backend.replica, asyncio.get_running_loop().time() + grace
        if replica is not None:
            replica.ready, backend.why = False, "it is draining"
            while replica.requests and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(POLL)
        return replica is None or not replica.requests

    async def update(self, grace: float) -> int:
        """Replace the processes one by one, the new one first; returns their number.

        Raises UserError if a new one does not start; the old ones keep running.
        """
        if not all(backend.own for backend in self._all()):
            raise UserError(
                "This router did not start its servers: drain each, update it, and resume."
            )
        if self._updating.locked():
            raise UserError("An update is already running: wait until it ends.")
        async with self._updating:
            replaced = self._all()
            for old in replaced:
                new = self._add(own=True)
                try:
                    await self._start(new)
                except UserError:
                    await self._remove(new)
                    raise
                await self.drain(old, grace)
                await self._remove(old)
        return len(replaced)

    # ---- processes ------------------------------------------------------------------------------

    def _add(self, url: str = "", own: bool = False) -> Backend:
        name = f"replica-{next(self._numbers)}"
        self.backends[name] = backend = Backend(name, url, own)
        return backend

    async def _remove(self, backend: Backend) -> None:
        await self._end(backend)
        del self.backends[backend.name]

    async def _start(self, backend: Backend) -> None:
        """Start its process and wait for it; restart it whenever it ends. Raises UserError."""
        try:
            await self._launch(backend)
        except BaseException:
            await self._end(backend)
            raise
        backend.keeping = asyncio.create_task(self._keep(backend))
        await self.check(backend)
        if not backend.ready:
            await self._end(backend)
            raise UserError(f"{backend.name} started but is not ready: {backend.why}.")

    async def _launch(self, backend: Backend) -> None:
        """Launch the process. Raises UserError with the server's last line if it does not start."""
        backend.process, backend.showing, url = await launch(backend.name, self.options.arguments)
        try:
            async with asyncio.timeout(STARTING):
                backend.url = await url
        except TimeoutError:
            backend.process.kill()
            raise UserError(f"{backend.name} was not ready after {STARTING:g} s.") from None
        backend.misses, backend.until = 0, 0.0

    async def _keep(self, backend: Backend) -> None:
        """Start the process again whenever it ends."""
        loop, wait = asyncio.get_running_loop(), BACKOFF
        while True:
            started = loop.time()
            assert backend.process is not None
            status = await backend.process.wait()
            self._lose(backend, f"its process ended with status {status}")
            backend.url = ""
            log.warning("%s: its process ended with status %d", backend.name, status)
            wait = BACKOFF if loop.time() - started > STEADY else min(LONGEST_BACKOFF, 2 * wait)
            await asyncio.sleep(wait)
            self.restarts += 1
            with contextlib.suppress(UserError, OSError):  # its log is shown; it is tried again
                await self._launch(backend)
                await self.check(backend)

    async def _end(self, backend: Backend) -> None:
        """Stop the process in order, or kill it; nothing is sent to the server any more."""
        backend.draining = True
        if backend.keeping:
            backend.keeping.cancel()
        self.routing.remove(backend.name)
        backend.replica = None
        if backend.process is not None:
            await close(backend.process)


async def launch(
    name: str, arguments: Sequence[str], host: str = "127.0.0.1"
) -> tuple[Process, asyncio.Task[None], asyncio.Future[str]]:
    """Start a server of stage 06 on a free port. Returns its process, the task that shows its log,
    and its address to be, which raises UserError with the server's last line if it does not
    start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{__package__}.child", *arguments, "--host", host, "--port", "0"),
        cwd=ROOT,
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=PIPE,
        limit=LONGEST_LINE,
        start_new_session=True,  # Ctrl-C is for the router, which ends its servers in order
    )
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return process, asyncio.create_task(_show(name, process, url)), url


async def close(process: Process, patience: float = STOPPING) -> None:
    """End a server in order, or kill it after `patience` seconds."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(patience):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _show(name: str, process: Process, url: asyncio.Future[str]) -> None:
    """Copy a server's log to standard error, each line after its name, and set `url` from it."""
    assert process.stderr is not None
    last = "try python -m stage06_serving to see why."
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # too long
            continue
        if not line:
            break
        text = line.decode(errors="replace").rstrip()
        last = text.removeprefix("error: ").strip() or last
        print(f"[{name}] {text}", file=sys.stderr, flush=True)
        if text.startswith(READY) and not url.done():
            url.set_result(text.split()[-1])
    if not url.done():
        url.set_exception(UserError(f"{name} did not start: {last}"))


async def whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises ClientPayloadError if it is cut off, or has over `most` bytes."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > most:
            raise aiohttp.ClientPayloadError("the answer is too long")
    return bytes(body)
