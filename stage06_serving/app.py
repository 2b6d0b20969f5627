"""The endpoints: OpenAI's, vLLM's, and a plain one.

protocol.py describes their bodies, service.py does their work, and formats.py writes the answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.cli import Loaded
from shared.errors import UserError

from .async_engine import CLOSING, AsyncEngine, Broken, EngineDead, EngineThread, Overloaded
from .chat import ChatTemplate, OwnTemplate, own_template
from .errors import NOT_AN_OBJECT, ApiError, error_body, failure, validation_message
from .formats import Completion, Echo, Generate, Offsets, Scores, completion_logprobs
from .forms import brought
from .guard import Guard, loading
from .live import Live
from .metrics import Metrics
from .protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    GenerateBody,
    TokenizeBody,
)
from .service import Answer, Choice, Format, Service, due, off_loop
from .settings import Settings
from .sse import EventStream
from .status import AnyEngine
from .writer import Events, Stream, gone

VERSION = "staircase stage06"
PAGE = Path(__file__).with_name("page.html")
LONG_BODY = 2**14  # bytes: a longer one is parsed off the event loop
LONG_ANSWER = 256  # tokens: a longer one is formatted off the event loop
GATHERED = 64  # tokens of a whole answer that are read at a time
Result = TypeVar("Result")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in (400, 401, 403, 404, 405, 408, 413, 431, 500, 503, 504)
}  # as in /openapi.json


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; if the client leaves, `work` is cancelled and ApiError raised."""

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client has disconnected.")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Api:
    """The endpoints that answer with text, streaming or not. One object serves all requests."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def generate(self, request: Request, body: GenerateBody) -> ASGIApp:
        deadline = self._deadline()
        choices = await self.service.generate(body, request.scope["tenant"])
        form = Generate(choices, self.service.note(body.max_tokens, choices))
        return await self._respond(request, choices, form, bool(body.stream), deadline)

    async def complete(self, request: Request, body: CompletionBody) -> ASGIApp:
        service, deadline, streams = self.service, self._deadline(), bool(body.stream)
        choices = await service.complete(body, request.scope["tenant"])
        echoes: dict[int, Echo] = {}
        if body.echo:
            n = body.n or 1
            try:
                echoed = await self._echoes(request, choices[::n], body, deadline)
            except BaseException:
                self._release(choices)
                raise
            echoes = {choice.index: echoed[choice.index // n] for choice in choices}
            if body.max_tokens == 0:
                self._release(choices)
                scores = Scores(body, echoed, choices, service.name)
                return await self._respond(request, (), scores, streams, deadline, echoes=True)
        form = Completion(body, choices, service, echoes)
        return await self._respond(request, choices, form, streams, deadline, bool(body.echo))

    async def chat(self, request: Request, body: ChatBody) -> ASGIApp:
        service, deadline = self.service, self._deadline()
        choices = await service.chat(body, request.scope["tenant"])
        form = service.forms.answer(body, choices, service)
        return await self._respond(request, choices, form, bool(body.stream), deadline)

    def _deadline(self) -> float:
        """The event-loop time by which a request that arrives now must be answered."""
        return asyncio.get_running_loop().time() + self.service.timeout

    async def _respond(
        self,
        request: Request,
        choices: Sequence[Choice],
        form: Format,
        streams: bool,
        deadline: float,
        echoes: bool = False,
    ) -> ASGIApp:
        """Answer with `choices`, which the engine has, in the format `form`: as a stream or as one
        body, by `deadline` (event-loop time). echoes: the body has the prompts, too."""
        if streams:
            events = Events(self.service, choices, form, self.service.stream_interval)
            return Stream(events, lambda: self._release(choices), deadline)

        async def answer() -> Response:
            async with asyncio.timeout_at(deadline):
                answers = await self._answers(choices)
            # Log-probabilities of thousands of tokens take half a second.
            if echoes or sum(len(answer.tokens) for answer in answers) > LONG_ANSWER:
                return await self.service.in_turn(lambda: body(answers))
            return body(answers)

        def body(answers: Sequence[Answer]) -> Response:
            return Response(to_json(form.whole(answers)), media_type="application/json")

        try:
            return await unless_gone(request, answer())
        finally:
            self._release(choices)

    async def _answers(self, choices: Sequence[Choice]) -> list[Answer]:
        """The whole answers. Raises Broken, EngineDead."""
        answers, enough = [Answer() for _ in choices], asyncio.Event()

        def news() -> None:
            if due(choices, GATHERED):
                enough.set()

        for choice in choices:
            choice.ticket.news = news
        while True:
            for choice, piece in self.service.pieces(choices):
                answers[choice.index].add(piece)
            if all(choice.ended for choice in choices):
                return answers
            enough.clear()
            await enough.wait()

    def _release(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self.service.engine.abort(choice.ticket)

    async def _echoes(
        self, request: Request, choices: Sequence[Choice], body: CompletionBody, deadline: float
    ) -> list[Echo]:
        """The texts of the prompts, with log-probabilities if the body asks for them. choices: one
        for each prompt.

        Raises ApiError, Broken, EngineDead, TimeoutError.
        """
        engine, tokenizer = self.service.engine, self.service.loaded.tokenizer

        def text_of(prompt: str | Sequence[int]) -> str:
            return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)

        # Thousands of texts: decoded off the event loop.
        texts = await self.service.in_turn(lambda: [*map(text_of, body.prompts)])
        if body.logprobs is None:
            return [(text, None) for text in texts]

        async def tables() -> list[Echo]:
            echoes: list[Echo] = []
            for text, choice in zip(texts, choices, strict=True):
                scores = await engine.result(choice.ticket)
                scored = list(zip(choice.prompt_ids, scores, strict=True))
                table = await self.service.in_turn(
                    completion_logprobs, tokenizer, scored, Offsets()
                )
                echoes.append((text, table))
            return echoes

        async with asyncio.timeout_at(deadline):
            return await unless_gone(request, tables())


Endpoint = Callable[[Request, Any], Coroutine[Any, Any, ASGIApp]]


class Direct:
    """Calls the endpoints that take a body, past FastAPI, whose way to them takes longer than their
    own work. endpoints: by path, with their bodies. The guard is outside."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, tuple[Any, Endpoint]]) -> None:
        self.app, self.endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.endpoints.get(scope.get("path", ""))
        if endpoint is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        kind, answer = endpoint
        try:
            data = (await receive())["body"]  # all of it: the guard has read it
            request, long = Request(scope, receive), len(data) > LONG_BODY
            body = await off_loop(long, parse, kind, data)
            # A thousand texts may be tokenized first, and not for a client that has left.
            work = answer(request, body)
            response = await (unless_gone(request, work) if long else work)
        except asyncio.CancelledError:  # the shutdown waits no longer
            response = error_response(EngineDead(CLOSING))
        except Exception as error:
            response = error_response(error)
        await response(scope, receive, send)


def described(kind: Any) -> Callable[..., Coroutine[Any, Any, None]]:
    """An endpoint with this body, for /openapi.json alone: `Direct` answers in its place."""

    async def endpoint(body: Any) -> None:
        raise NotImplementedError

    endpoint.__annotations__["body"] = kind
    return endpoint


def parse(kind: Any, data: bytes) -> Any:
    """The body of a request. Raises ApiError."""
    try:
        return kind.model_validate(json.loads(data))
    except ValidationError as error:
        raise ApiError(400, *validation_message(error.errors())) from None
    except (ValueError, RecursionError):
        raise ApiError(400, NOT_AN_OBJECT) from None


def error_response(error: Exception) -> Response:
    answer = failure(error)
    return JSONResponse(answer.body(), answer.status, answer.headers)


class App(FastAPI):
    """FastAPI, behind what requests meet first."""

    first: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.first if scope["type"] == "http" else super().__call__
        await app(scope, receive, send)


def answer_errors(app: FastAPI) -> None:
    """Have all errors answered in the form that OpenAI's clients expect."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        messages = {404: "This path does not exist.", 405: "This path does not allow this method."}
        message = messages.get(error.status_code, "The request cannot be read.")
        # The headers of 405 list the methods.
        body = error_body(error.status_code, message)
        return JSONResponse(body, error.status_code, error.headers)

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(error)

    for kind in (ApiError, UserError, Overloaded, EngineDead, Broken, TimeoutError, Exception):
        app.add_exception_handler(kind, failed)


def create_app(
    starting: Future[tuple[AnyEngine, Loaded]],
    settings: Settings,
    template: ChatTemplate | None,
    thread: EngineThread,
) -> FastAPI:
    """The server's application. It owns the engine that `starting` will hold, and runs it on
    `thread`, which makes it. Until then `state.engine` is missing, and only paths such as /health
    answer."""
    created, statuses, forms = int(time.time()), Counter[int](), brought()

    async def load() -> None:
        engine, loaded = await asyncio.shield(asyncio.wrap_future(starting))
        name = settings.served_model_name or loaded.config.name
        running = AsyncEngine(engine, settings.max_queue, thread)
        from_folder = own_template(loaded) if settings.chat_template == "auto" else None
        chats = from_folder or template
        state.service = Service(
            *(running, loaded, name, chats, forms(engine, loaded, chats)),
            timeout=settings.request_timeout,
            stream_interval=settings.stream_interval,
        )
        state.api = Api(state.service)
        state.metrics = Metrics(running, name, statuses)
        state.live = Live(running)
        running.start()
        state.engine = running

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.loading = asyncio.create_task(load())
        if starting.done():
            await asyncio.wait([state.loading])  # `serve` raises its error
        yield
        state.loading.cancel()
        if state.engine is not None:
            await state.engine.drain(0)
            await state.engine.stop()

    app = App(
        title="Staircase",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # see `openapi`
        responses=ERRORS,
        redirect_slashes=False,  # a redirect would name the host that the client chose
    )
    state: Any = app.state
    state.engine, state.statuses = None, statuses
    answer_errors(app)

    def card(name: str) -> dict[str, Any]:
        service: Service = state.service
        about = {"id": name, "object": "model", "created": created}
        chat = settings.chat or isinstance(service.template, OwnTemplate)  # for the page
        return about | {"owned_by": "staircase", "max_model_len": service.context, "chat": chat}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in state.service.names]}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        state.service.check_model(model_id)
        return card(model_id)

    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        service: Service = state.service
        service.check_model(body.model)
        strings = bool(body.return_token_strs)
        if body.messages is not None:
            answer = service.tokens_json(await service.chat_ids(body.messages), strings)
        else:
            answer = await unless_gone(request, service.tokenized(body.prompt or "", strings))
        return Response(answer, media_type="application/json")

    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        service: Service = state.service
        service.check_model(body.model)
        service.check_ids(body.tokens, "tokens")
        text = await service.decode(body.tokens)
        return Response(to_json({"prompt": text}), media_type="application/json")

    posted: dict[str, tuple[Any, Endpoint]] = {
        "/generate": (GenerateBody, lambda *call: state.api.generate(*call)),
        "/v1/completions": (forms.completion_body, lambda *call: state.api.complete(*call)),
        "/v1/chat/completions": (forms.chat_body, lambda *call: state.api.chat(*call)),
        "/tokenize": (TokenizeBody, tokenize),
        "/detokenize": (DetokenizeBody, detokenize),
    }
    for path, (kind, _) in posted.items():
        app.post(path, name=path, response_model=None)(described(kind))
    direct = Direct(partial(FastAPI.__call__, app), posted)
    app.first = Guard(direct, settings.keys, settings.hosts, statuses, state)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests can be answered. If not once the model is loaded, only a restart
        helps."""
        if state.engine is None:
            raise loading()
        if not state.engine.alive:
            raise ApiError(503, "The engine has stopped: restart the server.")
        return {"status": state.engine.health}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """Whether requests are accepted. For a router: how many wait, and how many forward passes
        have ended, which shows that answers go on."""
        now = await health()
        if now["status"] != "ok":
            raise ApiError(503, f"The server is {now['status']}.", headers={"Retry-After": "1"})
        engine = state.engine
        waiting = max(0, len(engine.in_flight) - len(engine.status.running))
        return now | {"waiting": waiting, "passes": engine.passes}

    @app.head("/version", include_in_schema=False)
    @app.get("/version")
    async def versions() -> dict[str, str]:
        import torch  # the router uses this module without it

        return {"version": VERSION, "torch": torch.__version__}

    @app.get("/openapi.json", response_model=None, include_in_schema=False)
    async def openapi() -> Response:
        """Off the event loop: the first time takes a quarter of a second."""
        return JSONResponse(await asyncio.to_thread(app.openapi))

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live", response_model=None)
    async def live() -> Response:
        watcher = state.live.watch()
        return EventStream(state.live.events(watcher), lambda: state.live.leave(watcher))

    @app.head("/", response_model=None, include_in_schema=False)
    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE, media_type="text/html")

    return app
