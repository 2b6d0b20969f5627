"""The server inside this process, for programs that look at its engine while it serves."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn

from stage06_serving.__main__ import (
    SWITCH,
    address_of,
    configure,
    keep_objects,
    listen,
    make_engine,
)
from stage06_serving.app import create_app
from stage06_serving.async_engine import EngineThread
from stage06_serving.settings import parse


class Inside:
    """The engine of a server's command line. As in the server, one thread computes and no other."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.settings, self.thread = parse([*arguments]), EngineThread()
        self.loading = self.thread.run(partial(make_engine, self.settings))
        self.served = self.loading.result()
        self.engine = self.served.engine

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve the engine, with the server's switch interval and garbage collection. Yields the
        address."""
        usual, often = sys.getswitchinterval(), gc.get_threshold()
        sys.setswitchinterval(SWITCH)
        try:
            async with listening(create_app(self.loading, self.settings, self.thread)) as url:
                keep_objects()
                yield url
        finally:
            gc.unfreeze()
            gc.set_threshold(*often)
            sys.setswitchinterval(usual)


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve `app` in this process, as `python -m stage06_serving` serves its own. Yields the
    address."""
    place = listen("127.0.0.1", 0)
    server = uvicorn.Server(configure(app))
    serving = asyncio.create_task(server.serve(sockets=[place]))
    try:
        while not server.started:
            if serving.done():
                raise RuntimeError("the application did not start")
            await asyncio.sleep(0.01)
        yield address_of(place)
    finally:
        server.should_exit = True
        await serving
