"""The servers behind the router: processes of its own, or addresses from its sources.

Only this file decides which of them may be chosen: those that pass their health checks, are not
draining, and stand well (standing.py). A server is in the policy from its first good health check
to its death. A health check never touches the load: requests at a server that answers slowly are
still in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

from shared.errors import UserError
from shared.server import STARTING

from .client import whole
from .process import SERVER, close, launch
from .routing import BLOCK_SIZE, Replica, Routing
from .sources import Find, Sources
from .standing import FIRST, LONGEST, WEIGHT, Standing

log = logging.getLogger(__name__)
CHECK = 0.5  # seconds between two health checks of a server, where there are few
MOST_CHECKS = 100  # a second: each takes the event loop a millisecond
FOLLOW = 1.0  # seconds between two looks at the sources
PATIENCE = 5.0  # seconds that a health check may take
MISSES = 3  # unanswered checks, after which a process is started again
STEADY = 10.0  # seconds that a process must have lived to be started again at once
POLL = 0.02  # seconds between two looks at the requests of a server that drains
LARGEST_BODY = 2**20  # bytes of an answer to a request of our own


@dataclass(frozen=True)
class Options:
    """What the command line says.

    backends: sources of addresses of servers that run already (sources.py); find: one more source.
        Without both, the router starts `replicas` servers, each `module` with `arguments`,
        and restarts any that end.
    timeout: seconds for a request with all its tries. first_byte: until an answer must begin; if it
        comes as a whole, until its server must have shown that it computes. idle: until an answer
        must go on.
    keys: that clients must send; the servers require the first one, if any.
    """

    backends: tuple[str, ...] = ()
    find: Find | None = None
    replicas: int = 2
    arguments: tuple[str, ...] = ()
    module: str = SERVER
    block_size: int = BLOCK_SIZE
    timeout: float = 300.0
    first_byte: float = 60.0
    idle: float = 60.0
    grace: float = 10.0
    hosts: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    admin_key: str = ""


@dataclass(eq=False)
class Backend:
    """A server behind the router.

    managed: a process that the router started.
    replica: in the policy; None while the server starts, is dead, or has another model.
    passing: whether the last health check was good. misses: checks in a row without an answer.
    passes: forward passes that the server reports. moved: when it reported a new one; when it last
        answered a health check, if it reports none.
    why: the reason that it gets no requests, for the administrator.
    """

    name: str
    url: str = ""
    managed: bool = False
    process: Process | None = None
    replica: Replica | None = None
    standing: Standing = field(default_factory=Standing)
    passing: bool = False
    misses: int = 0
    passes: object = None
    moved: float = 0.0
    draining: bool = False
    why: str = "it is starting"
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # its checks and restarts
    showing: asyncio.Task[None] | None = None  # its log

    @property
    def ready(self) -> bool:
        return self.replica is not None and self.replica.ready

    def about(self) -> dict[str, Any]:
        """For /health."""
        facts: dict[str, Any] = {"url": self.url, "ready": self.ready}
        if not self.ready:
            probing = self.passing and self.standing.probing
            why = "a request there shows whether it works again" if probing else self.why
            facts["why"] = "it is draining" if self.draining else why
        if replica := self.replica:
            facts |= {name: getattr(replica, name) for name in ("requests", "tokens", "queued")}
        return facts


class Pool:
    """All backends, and the policy that chooses among them.

    session: for all requests to servers; set it before `start`.
    """

    session: aiohttp.ClientSession

    def __init__(self, options: Options) -> None:
        self.options, self.routing = options, Routing(options.block_size)
        self.sources = Sources(options.backends, options.find)
        key = next(iter(options.keys), "")
        self.via = f"1.1 {secrets.token_hex(8)}"  # in all requests to servers, to know them again
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = ""  # that all servers must have: the first one's
        self.restarts = 0
        self._numbers = count()
        self._updating = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None  # the end of an ejection
        self.backends: dict[str, Backend] = {}
        for _ in range(0 if options.backends or options.find else options.replicas):
            self._add(managed=True)

    async def start(self) -> None:
        """Start the processes, and check all servers. Raises UserError if a process of the router
        does not start; another server may be dead now and alive later."""
        await asyncio.gather(*(self._start(backend) for backend in self._all() if backend.managed))
        await asyncio.gather(*map(self.check, await self.follow()))
        self._following = asyncio.create_task(self._follow_always())

    async def stop(self) -> None:
        """End all processes."""
        for timer in (self._following, self._settling):
            if timer:
                timer.cancel()
        await asyncio.gather(*map(self._end, self._all()))

    # ---- who may be chosen ----------------------------------------------------------------------

    @contextmanager
    def attempt(self, replica: Replica) -> Iterator[None]:
        """While a request is at the replica: during a probation it is the only one."""
        standing = self._standing(replica)
        probe = standing.begin()
        if probe:
            self.settle()
        try:
            yield
        finally:
            if probe:
                standing.end()
                self.settle()

    async def stalled(self, replica: Replica) -> None:
        """Wait until the replica, which has a request to compute, has shown no progress for
        `first_byte` seconds. A long answer comes at its end, and looks like none until then."""
        limit, late = self.options.first_byte, self.pause + PATIENCE  # a sign may be as old
        moved = began = self._now()
        while (left := max(began, moved + late) + limit - self._now()) > 0:
            await asyncio.sleep(min(left, limit))
            if (backend := self.backends.get(replica.name)) and backend.replica is replica:
                moved = backend.moved

    def served(self, replica: Replica) -> None:
        """The replica has begun to answer a request."""
        standing = self._standing(replica)
        standing.good(self._now())
        if standing.probing and not standing.failures:
            standing.end()
            self.settle()

    def erred(self, replica: Replica, why: str, weight: float = WEIGHT) -> None:
        """The replica has answered with an error; or, with weight 1, it is silent. Never are more
        than half of the servers ejected for their answers: then the fault may be the requests'."""
        backend, standing = self.backends.get(replica.name), self._standing(replica)
        if backend is None or backend.replica is not replica or not standing.bad(weight):
            return
        others = [other.standing for other in self._all() if other is not backend]
        if 2 * sum(other.failures > 0 for other in others) + 2 > len(others) + 1:
            standing.forgive()
        else:
            standing.eject(self._now())
            backend.why = why
            log.warning("%s is ejected: %s", backend.name, why)
        self.settle()

    def failed(self, replica: Replica, error: Exception) -> None:
        """Remove a replica that a request found dead. No other request must find that out again, so
        it leaves the policy at once, with everything remembered of its cache."""
        backend = self.backends.get(replica.name)
        if backend and backend.replica is replica:
            log.warning("%s: %s", backend.name, " ".join(str(error).split())[:200])
            self._lose(backend, f"a request failed on it ({type(error).__name__})")

    async def revival(self) -> None:
        """If no replica is alive, but a process of the router's starts again, wait until it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTING):
                while any(backend.managed for backend in self._all()) and not any(
                    backend.ready for backend in self._all()
                ):
                    await asyncio.sleep(POLL)

    def full(self, replica: Replica, seconds: float) -> None:
        """The replica has no room, and asks to be left alone for some seconds."""
        if backend := self.backends.get(replica.name):
            backend.standing.avoid(self._now(), seconds)
            backend.why = "it has no room"
            self.settle()

    def settle(self) -> None:
        """Decide anew which replicas may be chosen. If all that could be are ejected, the one whose
        time is up first is chosen all the same: refusing every request would help no one."""
        now, able = self._now(), dict[Replica, Standing]()
        for backend in self._all():
            if backend.replica:
                backend.replica.ready = False
                if backend.passing and not backend.draining:
                    able[backend.replica] = backend.standing
        for replica, standing in able.items():
            replica.ready = standing.open(now)
        if able and not any(replica.ready for replica in able):
            min(able, key=lambda replica: able[replica].until).ready = True
        if self._settling:
            self._settling.cancel()
        if ends := [standing.until for standing in able.values() if standing.until > now]:
            self._settling = asyncio.get_running_loop().call_at(min(ends), self.settle)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _standing(self, replica: Replica) -> Standing:
        backend = self.backends.get(replica.name)
        return backend.standing if backend and backend.replica is replica else Standing()

    def _lose(self, backend: Backend, why: str) -> None:
        if backend.replica is not None:
            log.warning("%s is lost: %s", backend.name, why)
            backend.standing.eject(self._now())
            self.routing.remove(backend.name)
        backend.replica, backend.passing, backend.why = None, False, why
        self.settle()

    # ---- which servers there are, and their health ----------------------------------------------

    @property
    def pause(self) -> float:
        """Seconds between two health checks of a server."""
        return max(CHECK, len(self.backends) / MOST_CHECKS)

    def _all(self) -> list[Backend]:
        return list(self.backends.values())

    async def _follow_always(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW)
            await self.follow()

    async def follow(self) -> list[Backend]:
        """Replace the servers by those of the sources; returns the new ones. Requests in flight
        continue."""
        urls = await self.sources()
        known = {backend.url: backend for backend in self._all() if not backend.managed}
        for url in known.keys() - set(urls):
            await self._remove(known[url])
        return [self._add(url) for url in urls if url not in known]

    async def _check_always(self, backend: Backend) -> None:
        """Check a server again and again, however long the others take."""
        while True:
            try:
                if backend.url:
                    await self.check(backend)
            except Exception:
                log.exception("a health check failed")
            await asyncio.sleep(self.pause)

    async def check(self, backend: Backend) -> None:
        """Check a server's health, and let it in or shut it out."""
        url, queued, status = backend.url, None, 0
        try:
            async with asyncio.timeout(PATIENCE):
                status, about = await self._ask(backend, "/ready")
                if status == 404:  # not one of ours
                    status, about = await self._ask(backend, "/health")
                if status == 200 and backend.replica is None:
                    await self._let_in(backend)
            backend.misses = 0
            facts = about if isinstance(about, dict) else {}
            queued, passes = facts.get("waiting"), facts.get("passes")
            if passes is None or passes != backend.passes:
                backend.passes, backend.moved = passes, self._now()
        except TimeoutError:
            backend.misses += 1
            if backend.misses >= MISSES and backend.process:
                self._lose(backend, f"it has not answered {MISSES} health checks")
                with contextlib.suppress(ProcessLookupError):
                    backend.process.kill()
        except (aiohttp.ClientError, OSError) as error:
            if backend.url == url:  # else this was the process before
                self._lose(backend, f"it cannot be reached ({type(error).__name__})")
            return
        if backend.replica is not None:
            backend.replica.queued = queued if isinstance(queued, int) else 0
            backend.passing = status == 200
            if not backend.passing:
                backend.why = f"its health check gave status {status}" if status else "it is slow"
            self.settle()

    def get(self, backend: Backend, path: str, via: str = "") -> AbstractAsyncContextManager[Any]:
        """A request of the router's own. via: of the request that it serves, if any."""
        headers = self.headers | {"via": f"{via} {self.via}"}
        return self.session.get(backend.url + path, headers=headers)

    async def _ask(self, backend: Backend, path: str) -> tuple[int, Any]:
        """Status and body of a request of the router's own; None for a body that is not JSON."""
        async with self.get(backend, path) as response:
            body = await whole(response, LARGEST_BODY)
        try:
            return int(response.status), json.loads(body)
        except (ValueError, RecursionError):
            return int(response.status), None

    async def _let_in(self, backend: Backend) -> None:
        """Add it to the policy, if it has the same model as the others."""
        _, models = await self._ask(backend, "/v1/models")
        try:
            model = str(models["data"][0]["id"])
        except (LookupError, TypeError):
            backend.why = "it has no list of models at /v1/models"
            return
        self.model = self.model or model
        if model != self.model:
            why = f"it serves the model {model[:80]!r}, not {self.model[:80]!r} like the others"
            if backend.why != why:
                log.warning("%s gets no requests: %s", backend.name, why)
            backend.why = why
        elif self.backends.get(backend.name) is backend and backend.replica is None:
            backend.replica = self.routing.add(backend.name)
            backend.replica.ready = False  # until it is settled

    async def add(self, url: str) -> Backend:
        """A running server, from an administrator. Raises UserError if it is there already."""
        if url in {backend.url for backend in self._all()}:
            raise UserError(f"{url} is a replica already: see /health.")
        self.sources.fixed.append(url)
        backend = self._add(url)
        await self.check(backend)
        return backend

    async def remove(self, backend: Backend, grace: float) -> bool:
        """Drain a server that `add` or the command line named, and forget it. Returns whether its
        requests ended in time. Raises UserError for other servers."""
        if backend.url not in self.sources.fixed:
            raise UserError(f"{backend.name} is not from an address: change its source instead.")
        drained = await self.drain(backend, grace)
        self.sources.fixed.remove(backend.url)
        await self.follow()
        return drained

    # ---- drain and update -----------------------------------------------------------------------

    async def drain(self, backend: Backend, grace: float) -> bool:
        """Send it no more requests, and wait for those in flight. Returns whether they ended in
        time."""
        backend.draining = True
        replica, end = backend.replica, self._now() + grace
        self.settle()
        while replica and replica.requests and self._now() < end:
            await asyncio.sleep(POLL)
        return replica is None or not replica.requests

    async def update(self, grace: float) -> int:
        """Replace the processes one by one, the new one first; returns their number.

        Raises UserError if a new one does not start; the old ones keep running.
        """
        if not all(backend.managed for backend in self._all()):
            raise UserError(
                "This router did not start its servers: drain each, update it, and resume."
            )
        if self._updating.locked():
            raise UserError("An update is already running: wait until it ends.")
        async with self._updating:
            replaced = self._all()
            for old in replaced:
                new = self._add(managed=True)
                try:
                    await self._start(new)
                except UserError:
                    await self._remove(new)
                    raise
                await self.drain(old, grace)
                await self._remove(old)
        return len(replaced)

    # ---- processes ------------------------------------------------------------------------------

    def _add(self, url: str = "", managed: bool = False) -> Backend:
        name = f"replica-{next(self._numbers)}"
        self.backends[name] = backend = Backend(name, url, managed)
        if url:
            backend.tasks.append(asyncio.create_task(self._check_always(backend)))
        return backend

    async def _remove(self, backend: Backend) -> None:
        await self._end(backend)
        del self.backends[backend.name]
        self.settle()

    async def _start(self, backend: Backend) -> None:
        """Start its process and wait for it; restart it whenever it ends. Raises UserError."""
        try:
            await self._launch(backend)
        except BaseException:
            await self._end(backend)
            raise
        await self.check(backend)
        watching = self._keep(backend), self._check_always(backend)
        backend.tasks += map(asyncio.create_task, watching)
        if not backend.ready:
            await self._end(backend)
            raise UserError(f"{backend.name} started but is not ready: {backend.why}.")

    async def _launch(self, backend: Backend) -> None:
        """Launch the process. Raises UserError with the server's last line if it does not start."""
        backend.process, backend.showing, url = await launch(
            backend.name, self.options.arguments, module=self.options.module
        )
        try:
            async with asyncio.timeout(STARTING):
                backend.url = await url
        except TimeoutError:
            backend.process.kill()
            raise UserError(f"{backend.name} was not ready after {STARTING:g} s.") from None
        backend.misses, backend.standing = 0, Standing()

    async def _keep(self, backend: Backend) -> None:
        """Start the process again whenever it ends."""
        wait = FIRST
        while True:
            started = self._now()
            assert backend.process is not None
            status = await backend.process.wait()
            self._lose(backend, f"its process ended with status {status}")
            backend.url = ""
            log.warning("%s: its process ended with status %d", backend.name, status)
            wait = FIRST if self._now() - started > STEADY else min(LONGEST, 2 * wait)
            await asyncio.sleep(wait)
            self.restarts += 1
            try:
                await self._launch(backend)
                await self.check(backend)
            except (UserError, OSError) as error:  # it is tried again
                log.warning("%s", error)

    async def _end(self, backend: Backend) -> None:
        """Stop the process in order, or kill it; nothing is sent to the server any more."""
        backend.draining = True
        for task in backend.tasks:
            task.cancel()
        self.routing.remove(backend.name)
        backend.replica = None
        if backend.process is not None:
            await close(backend.process)
