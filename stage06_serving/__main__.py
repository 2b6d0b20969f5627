"""Stage 06 on the command line: `python -m stage06_serving` starts the server."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import socket
import sys
from collections import deque

import uvicorn
from fastapi import FastAPI

from shared import checkpoint, cli
from shared.errors import UserError
from shared.peers import transformers_model
from stage01_forward.model import load_model
from stage04_continuous.engine import Engine as SlotEngine
from stage04_continuous.scheduler import Scheduler as SlotScheduler
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import Engine
from stage05_paged.memory import (
    block_bytes,
    default_memory,
    free_memory,
    make_pool,
    parse_memory,
    size,
)
from stage05_paged.scheduler import Scheduler

from .app import create_app
from .async_engine import EngineThread
from .chat import ChatTemplate, load_template
from .engines import AnyEngine, Batches, OneByOne, Slots, Static, Transformers
from .settings import Settings, parse

BUDGET = 256  # tokens in a step, if nobody says
LARGEST_HEADERS = 16_384  # bytes
RECORDS = 1_000  # of steps, that the engine keeps: whoever watches is told of each, and 100,000 take half a gigabyte
SWITCH = 0.0002  # seconds: the engine, which has little to do in Python, need not wait for longer until the loop gives way
CLOSE = 2  # seconds for connections to close once their answers have ended


class Server(uvicorn.Server):
    """uvicorn that lets the engine finish what it has in hand when it is told to stop, and ends the rest with an error."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, grace: float) -> None:
        super().__init__(config)
        self.app, self.grace = app, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.app.state.engine.drain(self.grace, lambda: self.force_exit)  # second Ctrl-C
        self.force_exit = False  # all answers have ended: let the application end in order
        await super().shutdown(sockets)


def make_engine(settings: Settings) -> tuple[AnyEngine, cli.Loaded]:
    """The model and its engine. Raises UserError for what cannot be loaded, or finds no memory."""
    if settings.engine != "paged" and (settings.sanitize or settings.swap_memory):
        raise UserError(
            f"--sanitize and --swap-memory are for blocks, which '{settings.engine}' has not: leave them out."
        )
    options = argparse.Namespace(
        model=settings.model, random_weights=settings.random_weights, seed=0, device=settings.device, dtype=settings.dtype,
        linear=settings.linear, threads=settings.threads or None,
    )  # fmt: skip
    loaded = cli.load_model_from(options, load_model)
    config, dtype = loaded.config, loaded.dtype
    free = free_memory(loaded.device)
    if settings.kv_memory:
        memory = parse_memory(settings.kv_memory, free)
    else:
        memory = default_memory(config, dtype, settings.max_sequences, free, settings.block_size)
    budget = settings.token_budget or max(BUDGET, settings.max_sequences)
    if settings.engine != "paged":
        return make_adapter(settings, loaded, memory, budget), loaded
    pool = make_pool(memory, config, dtype, settings.block_size)
    swap_pool = None
    if settings.swap_memory:
        swap = parse_memory(settings.swap_memory, free_memory("cpu"))
        swap_pool = BlockPool(
            max(1, swap // block_bytes(config, dtype, settings.block_size)), settings.block_size
        )
    scheduler = Scheduler(
        pool, settings.max_sequences, budget, prefix_caching=settings.prefix_caching, preemption=settings.preemption,
        swap_pool=swap_pool,
    )  # fmt: skip
    return Engine(loaded.model, scheduler=scheduler, sanitize=settings.sanitize), loaded


def make_adapter(settings: Settings, loaded: cli.Loaded, memory: int, budget: int) -> AnyEngine:
    """One of the other engines, with as many whole contexts as `memory` bytes hold. Raises UserError if that is none."""
    pool = make_pool(
        memory, loaded.config, loaded.dtype, loaded.config.n_positions
    )  # a block for a whole context
    rows = min(settings.max_sequences, pool.count)
    if settings.engine == "continuous":
        scheduler = SlotScheduler(rows, max(budget, rows))
        return Slots(SlotEngine(loaded.model, scheduler=scheduler))
    if settings.engine == "static":
        return Batches(loaded.model, Static(loaded.model, rows), rows)
    if settings.engine == "sequential":
        return Batches(loaded.model, OneByOne(loaded.model), 1)
    weights = checkpoint.load(settings.model, random_weights=settings.random_weights)
    theirs = transformers_model(weights, loaded.dtype).to(loaded.device)
    return Batches(loaded.model, Transformers(theirs, loaded.config), 1)


def plan(settings: Settings, engine: AnyEngine, loaded: cli.Loaded, address: str) -> str:
    """What is told at the start: where, what, how much memory, and how to try it."""
    pool, config = engine.scheduler.pool, loaded.config
    name = settings.served_model_name or config.name
    whole = pool.count // -(-config.n_positions // pool.block_size)
    memory = pool.count * pool.block_size * config.kv_bytes_per_token(loaded.dtype)
    contexts = f"{whole} whole context{'' if whole == 1 else 's'}"
    key = ' -H "Authorization: Bearer $STAIRCASE_API_KEY"' if settings.keys else ""
    return (
        f"Staircase serves {name} at {address}\n"
        f"  model   {loaded}\n"
        f"  engine  {settings.engine}\n"
        f"  memory  {size(memory)} in {pool.count} blocks of {pool.block_size} tokens: {contexts} of "
        f"{config.n_positions}; at most {engine.scheduler.max_sequences} answers at a time, {settings.max_queue} more in line\n"
        f"  page    {address}/\n"
        f"  try     curl -N {address}/v1/completions{key} -H 'Content-Type: application/json' "
        f"""-d '{{"prompt": "Once upon a time", "max_tokens": 40, "stream": true}}'"""
    )


def main(argv: list[str] | None = None) -> int:
    settings = parse(argv)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    template = load_template(settings.chat_template)
    with listen(
        settings.host, settings.port
    ) as listening:  # before the model is loaded, which takes longer
        serve(settings, template, listening)
    return 0


def serve(settings: Settings, template: ChatTemplate | None, listening: socket.socket) -> None:
    """Answer on `listening` until the process is told to stop."""
    thread = EngineThread()
    engine, loaded = thread.run(lambda: make_engine(settings)).result()
    engine.steps = deque(maxlen=RECORDS)
    app = create_app(engine, loaded, settings, template, thread)
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if settings.open_to_all:
        print(
            f"WARNING: --host {settings.host} lets everybody who can reach this machine use the server, and there is no "
            "--api-key: set one, or listen on 127.0.0.1.",
            file=sys.stderr,
        )
    print(plan(settings, engine, loaded, address), file=sys.stderr, flush=True)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, http="h11", ws="none", lifespan="on", server_header=False,
        h11_max_incomplete_event_size=LARGEST_HEADERS, timeout_graceful_shutdown=CLOSE,
    )  # fmt: skip
    server = Server(config, app, settings.grace)
    sys.setswitchinterval(SWITCH)
    # The garbage collector would look at all that the libraries have made, again and again: a third of a second, in which nobody
    # else gets on. It stays anyway.
    gc.collect()
    gc.freeze()
    asyncio.run(server.serve(sockets=[listening]))


def listen(host: str, port: int) -> socket.socket:
    """The socket to listen on. Raises UserError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"Port {port} on {host} cannot be opened ({error.strerror}): choose another --port, or stop what has it."
        ) from None
    # Events are small, and must not wait for the client's word on the one before (Nagle). asyncio turns that off for sockets
    # that it makes itself, and not for this one; connections inherit it.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


if __name__ == "__main__":
    cli.run(main)
