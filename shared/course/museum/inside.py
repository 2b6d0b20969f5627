"""A server of stage 06 and its clients in one process, without a socket: for symptoms, and for tests that must see a copy.

A server that is started as a process of its own runs the reference, whatever copy is laid over the stage here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HANG = 60.0  # seconds after which a script is given up


@dataclass
class Heard:
    """What a client has received so far."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """Raises ValueError if the body is none."""
        return json.loads(self.body)

    def events(self) -> Iterator[Any]:
        """The data of a stream's events: objects, and "[DONE]" as it is."""
        for line in self.body.decode("utf-8").splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


class Asking:
    """One request on its way. Await `answer` for all that comes of it, or leave before."""

    def __init__(self, app: Any, path: str, body: dict[str, Any] | None) -> None:
        self.heard = Heard()
        self._gone = asyncio.Event()
        self._sent = [
            {
                "type": "http.request",
                "body": b"" if body is None else json.dumps(body).encode(),
                "more_body": False,
            }
        ]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "path": path, "root_path": "",
            "raw_path": path.encode(), "query_string": b"", "method": "GET" if body is None else "POST",
            "headers": [(b"content-type", b"application/json")], "client": ("inside", 1), "server": ("inside", 2),
        }  # fmt: skip
        self._task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Hang up, as a client does that has been closed: the server is told, and nobody reads on."""
        self._gone.set()

    async def answer(self) -> Heard:
        await self._task
        return self.heard

    async def _receive(self) -> dict[str, Any]:
        if self._sent:
            return self._sent.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            return  # as a server does with what it cannot send any more
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
    def run(script: Callable[[Inside], Awaitable[Any]], **settings: Any) -> Any:
        """What `script` returns. `settings` are the server's."""
        app_of, making = (
            importlib.import_module("stage06_serving.app"),
            importlib.import_module("stage06_serving.__main__"),
        )
        asynchronous, chosen = (
            importlib.import_module(f"stage06_serving.{name}")
            for name in ("async_engine", "settings")
        )

        async def main() -> Any:
            thread = asynchronous.EngineThread()
            wanted = chosen.Settings(**{"linear": "plain", "kv_memory": "32MiB", **settings})
            engine, loaded = thread.run(lambda: making.make_engine(wanted)).result()
            app = app_of.create_app(engine, loaded, wanted, None, thread)
            async with asyncio.timeout(HANG), app.router.lifespan_context(app):
                return await script(Inside(app, engine.engine))

        return asyncio.run(main())

    def begin(self, path: str, body: dict[str, Any] | None = None) -> Asking:
        """Send a request: POST with a body, GET without. To be called on the event loop."""
        return Asking(self.app, path, body)

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> Heard:
        return await self.begin(path, body).answer()

    async def passes(self, count: int) -> None:
        """Until the engine has made so many."""
        while len(self.engine.steps) < count:
            await asyncio.sleep(0.001)
