"""Stage 06 on the command line: `python -m stage06_serving` starts the server."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from shared import catalog, cli, models, registry
from shared.errors import UserError
from shared.files import read_json
from stage05_paged.memory import default_memory, free_memory, make_pool, parse_memory, size

from . import logs
from .async_engine import EngineThread
from .settings import OFF, Settings, parse

if TYPE_CHECKING:  # the settings are checked, and the port is taken, before these are imported
    from fastapi import FastAPI

    from .choice import Served

log = logging.getLogger(__name__)
BUDGET = 256  # tokens in a step, by default
SWITCH = 0.0002  # seconds until the engine's thread, which runs little Python, gets the lock
BACKLOG = 1024  # connections that wait to be accepted
CLOSE = 2  # seconds for connections to close once their answers have ended
MOST_CONNECTIONS = 4096  # and requests at a time; uvicorn answers more with 503
GENERATION = "generation_config.json"
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Server(uvicorn.Server):
    """uvicorn with a drain: at shutdown, requests in flight may end, and the rest get an error."""

    def __init__(self, app: FastAPI, grace: float) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,  # see logs.py
            ws="none",
            lifespan="on",
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=CLOSE,
        )
        super().__init__(config)
        self.app, self.grace = app, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit |= self.should_exit  # at the second signal, whichever it is
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine = self.app.state.engine
        if engine.awaited and self.grace:
            log.warning(
                "Waiting up to %g s for %d sequences in flight: Ctrl-C again ends them at once.",
                *(self.grace, engine.awaited),
            )
        await engine.drain(self.grace, lambda: self.force_exit)
        self.force_exit = False  # all answers have ended: let the application end in order
        await super().shutdown(sockets)


def make_engine(settings: Settings) -> Served:
    """The model and its engine. Raises UserError for a model that cannot be loaded, for an engine
    that cannot run here, and for lack of memory."""
    from .choice import Served, choose

    speculative, drafts = settings.speculate, settings.speculate == "draft"
    if bool(settings.speculative_model) != drafts or settings.drawn_drafts > drafts:
        raise UserError(
            "--speculate draft and --speculative-model NAME need each other, and --drawn-drafts "
            "needs both: give them together, or none."
        )
    device, dtype = cli.device_and_dtype(settings)
    choice = choose(settings.engine, dtype, device)
    changed = {"seed": 0, "linear": choice.linear("auto"), "threads": settings.threads or None}
    loaded = cli.load_model_from(argparse.Namespace(**settings.model_dump() | changed))
    config, dtype, free = loaded.config, loaded.kv_dtype, free_memory(device)
    if loaded.tokenizer.eos_id not in (None, *config.eos_ids):
        log.warning(
            "Answers end at the ids %s, as the model's files say, and not at the tokenizer's %d: "
            "clients can add it as stop_token_ids.",
            *(config.eos_ids, loaded.tokenizer.eos_id),
        )
    memory = default_memory(config, dtype, settings.max_num_seqs, free)
    if settings.kv_memory:
        memory = parse_memory(settings.kv_memory, free)
    engine = choice.make(
        *(loaded, "auto"),
        pool=make_pool(memory, config, dtype),
        sanitize=settings.sanitize,
        max_sequences=settings.max_num_seqs,
        token_budget=settings.max_num_batched_tokens or max(BUDGET, settings.max_num_seqs),
        policy="priority",
        prefix_caching=settings.enable_prefix_caching,
        **cli.cache_options(settings.kv_dtype),
    )
    served = Served(engine, loaded, choice, sampling_defaults(settings, loaded.folder))
    if speculative != OFF:
        model = None
        if drafts:
            weights = models.load(catalog.checked(settings.speculative_model))
            model = models.load_model(weights, loaded.device, loaded.dtype)
        speculate = registry.load(registry.DRAFTS[speculative])
        options = speculative, settings.num_speculative_tokens, model, settings.drawn_drafts
        served.engine = speculate(engine, *options)
        served.drafts = served.engine.scheduler.draft_counts
    return served


def sampling_defaults(settings: Settings, folder: Path | None) -> dict[str, Any]:
    """The sampling options of requests that do not give them: the server's, else those of the
    model's generation_config.json, else OpenAI's. Raises UserError for an invalid file."""
    from stage01_forward.params import SamplingParams

    fields: dict[str, Any] = {}
    if folder and (folder / GENERATION).exists():
        kept = read_json(folder / GENERATION).items()
        fields = {name: value for name, value in kept if name in SAMPLED and value is not None}
    try:
        SamplingParams(**fields)
    except UserError as error:
        why = str(error).removesuffix(".")
        raise UserError(f"{folder}/{GENERATION} has a wrong value ({why}): correct it.") from None
    options = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in options.items() if value is not None}
    return {"temperature": 1.0, **fields, **given}


def plan(settings: Settings, served: Served, address: str) -> str:
    """The text at the start: address, model, memory, and a command to try."""
    loaded, pool = served.loaded, served.engine.scheduler.pool
    config, count = loaded.config, pool.count
    whole = count // -(-config.n_positions // pool.block_size)
    memory = size(count * pool.block_size * config.kv_bytes_per_token(loaded.kv_dtype))
    contexts = f"{whole} whole context{'' if whole == 1 else 's'}"
    drafts = f"{settings.speculate}, at most {settings.num_speculative_tokens} in a step"
    drafts += ", drawn" if settings.drawn_drafts else ""
    sampling = ", ".join(f"{name} {value:g}" for name, value in served.defaults.items())
    key = ' -H "Authorization: Bearer $STAIRCASE_API_KEY"' if settings.keys else ""
    return (
        f"Staircase serves {config.name} at {address}\n"
        f"  model    {config.name}, context of {config.n_positions:,} tokens\n"
        f"  engine   {served.choice.name}, {loaded.machine}\n"
        + (f"  faster   {served.choice.reason}\n" if served.choice.reason else "")
        + f"  memory   {memory} in {count} blocks of {pool.block_size} tokens: {contexts} of "
        f"{config.n_positions}; at most {settings.max_num_seqs} sequences at a time, "
        f"{settings.max_queue} more in the queue\n"
        f"  sampling {sampling}, unless a request says otherwise\n"
        + (f"  drafts   {drafts}\n" if settings.speculate != OFF else "")
        + f"  page     {address}/\n"
        f"  try      curl -N {address}/v1/completions{key} -H 'Content-Type: application/json' "
        f"""-d '{{"prompt": "Once upon a time", "max_tokens": 40, "stream": true}}'"""
    )


def main(argv: list[str] | None = None) -> int:
    settings = parse(argv)
    logs.start(settings.log_requests)
    # The port is taken before the model is loaded, which takes longer.
    with bind(settings.host, settings.port) as place:
        # Python's own handler would end the interpreter under a thread that computes, and abort.
        # The server shuts down first, and then lets the signal end the process.
        main_thread = threading.current_thread() is threading.main_thread()
        if main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if settings.open_to_all:
            say(
                f"WARNING: --host {settings.host} opens the server to every machine that can reach "
                "this one, without an API key: set STAIRCASE_API_KEY, or listen on 127.0.0.1 "
                "behind a proxy."
            )
        say(f"Loading {settings.model}")
        serve(settings, place)
    return 0


def serve(settings: Settings, place: socket.socket) -> None:
    """Load the model, and answer until a signal ends the process."""
    thread = EngineThread()
    served = thread.run(lambda: make_engine(settings)).result()
    from .app import create_app

    server = Server(create_app(served, settings, thread), settings.grace)
    keep_objects()
    sys.setswitchinterval(SWITCH)
    place.listen(BACKLOG)
    say(plan(settings, served, address_of(place)))
    asyncio.run(server.serve(sockets=[place]))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def keep_objects() -> None:
    """Hide all objects so far, such as the libraries', from the garbage collector, and let it look
    less often: each time it would visit them all, and stop the event loop for a third of a
    second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen on, once the model is loaded. Raises UserError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Events are small, and must not wait until the client confirms the one before (Nagle).
    place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        place.bind((host, port))
    except OSError as error:
        place.close()
        raise UserError(
            f"The server cannot listen on {host}, port {port} ({error.strerror}): choose an "
            "address of this machine with --host, and a free --port."
        ) from None
    return place


def address_of(place: socket.socket) -> str:
    host, port = place.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


if __name__ == "__main__":
    cli.run(main)
