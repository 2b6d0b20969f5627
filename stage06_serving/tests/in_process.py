"""A server of stage 06 and its clients in one process, without a socket, for the tests
of the writer.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HANG = 60.0  # seconds until a script is cancelled


@dataclass
class Heard:
    """What a client has received so far."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """Raises ValueError if the body is not JSON."""
        return json.loads(self.body)

    def events(self) -> Iterator[Any]:
        """The data of a stream's events: objects, and "[DONE]" as it is."""
        for line in self.body.decode("utf-8").splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


class Asking:
    """One request in flight. Await `answer` for the whole answer, or leave before."""

    def __init__(self, app: Any, path: str, body: dict[str, Any] | None) -> None:
        self.heard = Heard()
        self._gone = asyncio.Event()
        self._left: Callable[[], object] | None = None
        data = b"" if body is None else json.dumps(body).encode()
        self._sent = [{"type": "http.request", "body": data, "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": "GET" if body is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("inside", 1),
            "server": ("inside", 2),
            "extensions": {"staircase.write": self._write, "staircase.left": self._on_left},
        }
        self._task = asyncio.create_task(app(scope, self._receive, self._send))
        # Its error is for `answer`; where a test ends before, nothing more is said of it.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def leave(self) -> None:
        """Hang up, like a client that is closed: the server is notified, and the answer dropped."""
        self._gone.set()
        if self._left is not None:
            self._left()

    def _on_left(self, do: Callable[[], object]) -> None:
        self._left = do

    def check(self) -> None:
        """Raise the application's error, if it has ended with one."""
        if self._task.done():
            self._task.result()

    async def answer(self) -> Heard:
        await self._task
        return self.heard

    async def _receive(self) -> dict[str, Any]:
        if self._sent:
            return self._sent.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def _write(self, data: bytes) -> bool:
        """Behaves like a connection whose client keeps up."""
        if not self._gone.is_set():
            self.heard.body += data
        return True

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            return  # a server drops it, too
        if message["type"] == "http.response.start":
            self.heard.status = message["status"]
            self.heard.headers = {
                name.decode().lower(): value.decode() for name, value in message["headers"]
            }
        else:
            self.heard.body += message.get("body", b"")


class Inside:
    """The application of stage 06 with the embedded model, while it serves."""

    def __init__(self, app: Any, engine: Any) -> None:
        self.app, self.engine = app, engine

    @staticmethod
    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[Inside]:
        """The server, up while the block lasts. settings: the server's."""
        modules = ("app", "__main__", "async_engine", "settings")
        app_module, program, async_engine, options = (
            importlib.import_module(f"stage06_serving.{name}") for name in modules
        )
        thread = async_engine.EngineThread()
        wanted = options.Settings(
            **{"engine": "paged", "linear": "plain", "kv_memory": "32MiB", **settings}
        )
        starting = thread.run(lambda: program.make_engine(wanted))
        engine, _ = starting.result()
        app = app_module.create_app(starting, wanted, None, thread)
        async with asyncio.timeout(HANG), app.router.lifespan_context(app):
            yield Inside(app, engine.engine)

    @staticmethod
    def run(script: Callable[[Inside], Awaitable[Any]], **settings: Any) -> Any:
        """Run `script` while the server is up, and return its result. settings: the server's."""

        async def main() -> Any:
            async with Inside.serving(**settings) as inside:
                return await script(inside)

        return asyncio.run(main())

    def begin(self, path: str, body: dict[str, Any] | None = None) -> Asking:
        """Send a request: POST with a body, GET without. Call it on the event loop."""
        return Asking(self.app, path, body)

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> Heard:
        return await self.begin(path, body).answer()

    async def passes(self, count: int) -> None:
        """Wait until the engine has made `count` steps."""
        while len(self.engine.steps) < count:
            await asyncio.sleep(0.001)
