"""The endpoints: OpenAI's, vLLM's, and a plain one.

protocol.py describes their bodies, service.py does their work, and formats.py writes the answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from shared.cli import Loaded
from shared.errors import UserError

from .async_engine import AsyncEngine, Broken, EngineDead, EngineThread, Overloaded, log
from .chat import ChatTemplate, OwnTemplate, own_template
from .errors import ApiError, error_body, validation_message
from .formats import Chat, Completion, Echo, Format, Generate, Offsets, Scores, completion_logprobs
from .guard import Guard
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
from .service import Answer, Choice, Service
from .settings import Settings
from .sse import DONE, EventStream, event
from .status import AnyEngine

VERSION = "staircase stage06"
PAGE = Path(__file__).with_name("page.html")
LATE = (
    "The request took longer than the server allows: ask for fewer tokens, or raise "
    "--request-timeout."
)
Result = TypeVar("Result")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in (400, 401, 403, 404, 405, 408, 413, 431, 500, 503, 504)
}  # as in /openapi.json


def failure(error: BaseException) -> ApiError:
    """The answer for an error. An unexpected error is logged, and its text is not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, Overloaded):
        return ApiError(503, str(error), headers={"Retry-After": "1"})
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, Broken):
        return ApiError(500, str(error))
    if isinstance(error, TimeoutError):  # a retry would double the work
        return ApiError(504, LATE, headers={"x-should-retry": "false"})
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server failed to answer this request: see its log for the reason.")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; if the client leaves, `work` is cancelled and ApiError raised."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
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

    async def generate(self, request: Request, body: GenerateBody) -> Response:
        deadline = self._deadline()
        choices = await self.service.generate(body, request.scope["tenant"])
        made = Generate(choices, self.service.note(body.max_tokens, choices))
        return await self._respond(request, choices, made, bool(body.stream), deadline)

    async def complete(self, request: Request, body: CompletionBody) -> Response:
        service, deadline, streams = self.service, self._deadline(), bool(body.stream)
        if body.max_tokens == 0 and body.echo:
            scores = await self._scores(request, body, deadline)
            return await self._respond(request, (), scores, streams, deadline)
        choices = await service.complete(body, request.scope["tenant"])
        echoes: dict[int, Echo] = {}
        if body.echo:
            n = body.n or 1
            prompts = [choice.prompt_ids for choice in choices[::n]]
            try:
                echoed = await self._echoes(request, prompts, body, deadline)
            except BaseException:
                self._release(choices)
                raise
            echoes = {choice.index: echoed[choice.index // n] for choice in choices}
        made = Completion(body, choices, service, echoes)
        return await self._respond(request, choices, made, streams, deadline)

    async def chat(self, request: Request, body: ChatBody) -> Response:
        service, deadline = self.service, self._deadline()
        choices = await service.chat(body, request.scope["tenant"])
        made = Chat(body, choices, service)
        return await self._respond(request, choices, made, bool(body.stream), deadline)

    def _deadline(self) -> float:
        """The event-loop time by which a request that arrives now must be answered."""
        return asyncio.get_running_loop().time() + self.service.timeout

    async def _respond(
        self,
        request: Request,
        choices: Sequence[Choice],
        made: Format,
        streams: bool,
        deadline: float,
    ) -> Response:
        """Answer with `choices`, which the engine has, in the format `made`: as a stream or as one
        body, by `deadline` (event-loop time)."""
        if streams:
            return EventStream(
                self._events(choices, made, deadline), lambda: self._release(choices), deadline
            )

        async def answer() -> Response:
            answers = [Answer() for _ in choices]
            async with aclosing(self.service.pieces(choices, deadline)) as pieces:
                async for choice, piece in pieces:
                    answers[choice.index].add(piece)
            return JSONResponse(made.whole(answers))

        try:
            return await unless_gone(request, answer())
        finally:
            self._release(choices)

    async def _events(
        self, choices: Sequence[Choice], made: Format, deadline: float
    ) -> AsyncIterator[str]:
        try:
            async with aclosing(self.service.pieces(choices, deadline)) as pieces:
                async for choice, piece in pieces:
                    for chunk in made.chunks(choice, piece):
                        yield event(chunk)
            for chunk in made.last():
                yield event(chunk)
        except Exception as error:  # the status is sent already: report the error in the stream
            yield event(failure(error).body())
        yield DONE

    def _release(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self.service.engine.abort(choice.ticket)

    async def _echoes(
        self, request: Request, prompts: Sequence[list[int]], body: CompletionBody, deadline: float
    ) -> list[Echo]:
        """The text of `prompts` (ids), with log-probabilities if the body asks for them.

        Raises ApiError, TimeoutError.
        """
        service, top = self.service, body.logprobs
        tokenizer = service.loaded.tokenizer
        texts = [text if isinstance(text, str) else tokenizer.decode(text) for text in body.prompts]
        if top is None:
            return [(text, None) for text in texts]
        if service.check_model(body.model):
            message = (
                "Only the model itself scores prompts: leave 'echo' or 'logprobs' out, or ask "
                f"for '{service.name}'."
            )
            raise ApiError(400, message, "logprobs")
        service.check_scores(sum(map(len, prompts)), top)

        async def score() -> list[Echo]:
            echoes: list[Echo] = []
            for text, ids in zip(texts, prompts, strict=True):
                scored = list(zip(ids, await service.score(ids, top), strict=True))
                # Thousands of texts: decoded off the event loop.
                table = await asyncio.to_thread(completion_logprobs, tokenizer, scored, Offsets())
                echoes.append((text, table))
            return echoes

        async with asyncio.timeout_at(deadline):
            return await unless_gone(request, score())

    async def _scores(self, request: Request, body: CompletionBody, deadline: float) -> Scores:
        service = self.service
        service.check_model(body.model)
        prompts = await service.all_prompt_ids(body.prompts)
        for ids in prompts:
            service.check_ids(ids, "prompt")
        with service.engine.place(len(prompts)):
            echoes = await self._echoes(request, prompts, body, deadline)
        return Scores(body, echoes, sum(map(len, prompts)), service.name)


def answer_errors(app: FastAPI) -> None:
    """Have all errors answered in the form that OpenAI's clients expect."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, field = validation_message(list(error.errors()))
        return JSONResponse(error_body(400, message, field), 400)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        messages = {404: "This path does not exist.", 405: "This path does not allow this method."}
        message = messages.get(error.status_code, "The request cannot be read.")
        # The headers of 405 list the methods.
        body = error_body(error.status_code, message)
        return JSONResponse(body, error.status_code, error.headers)

    async def failed(request: Request, error: Exception) -> Response:
        answer = failure(error)
        return JSONResponse(answer.body(), answer.status, answer.headers)

    for kind in (ApiError, UserError, Overloaded, EngineDead, Broken, TimeoutError, Exception):
        app.add_exception_handler(kind, failed)


def create_app(
    made: Future[tuple[AnyEngine, Loaded]],
    settings: Settings,
    template: ChatTemplate | None,
    thread: EngineThread,
) -> FastAPI:
    """The server's application. It owns the engine that `made` will hold, and runs it on `thread`,
    which makes it. Until then `state.engine` is missing, and only paths such as /health answer."""
    created, statuses = int(time.time()), Counter[int]()

    async def load() -> None:
        engine, loaded = await asyncio.shield(asyncio.wrap_future(made))
        name = settings.served_model_name or loaded.config.name
        running = AsyncEngine(engine, settings.max_queue, thread)
        own = own_template(loaded) if settings.chat_template == "auto" else None
        state.service = Service(running, loaded, name, own or template, settings.request_timeout)
        state.api = Api(state.service)
        state.metrics = Metrics(running, name, statuses)
        state.live = Live(running)
        running.start()
        state.engine = running

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.loading = asyncio.create_task(load())
        if made.done():
            await asyncio.wait([state.loading])  # `serve` raises its error
        yield
        state.loading.cancel()
        if state.engine is not None:
            await state.engine.drain(0)
            await state.engine.stop()

    app = FastAPI(
        title="Staircase",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
        redirect_slashes=False,  # a redirect would name the host that the client chose
    )
    state: Any = app.state
    state.engine, state.statuses = None, statuses
    app.add_middleware(
        Guard, keys=settings.keys, hosts=settings.hosts, statuses=statuses, state=state
    )

    answer_errors(app)

    @app.post("/generate", response_model=None)
    async def generate(request: Request, body: GenerateBody) -> Response:
        return await state.api.generate(request, body)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await state.api.complete(request, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await state.api.chat(request, body)

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

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service: Service = state.service
        service.check_model(body.model)
        if body.messages is not None:
            tokens = await service.chat_ids(body.messages)
        else:
            tokens = await service.encode(body.prompt or "")
        answer = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = await service.token_texts(tokens)
        return answer

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service: Service = state.service
        service.check_model(body.model)
        service.check_ids(body.tokens, "tokens")
        return {"prompt": service.loaded.tokenizer.decode(body.tokens)}

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the process works: if not, only a restart helps."""
        if state.engine is None:
            return {"status": "loading"}
        if not state.engine.alive:
            raise ApiError(503, "The engine has stopped: restart the server.")
        return {"status": state.engine.health}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """Whether requests are accepted."""
        now = await health()
        if now["status"] != "ok":
            raise ApiError(503, f"The server is {now['status']}.", headers={"Retry-After": "1"})
        return now

    @app.head("/version", include_in_schema=False)
    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": VERSION, "torch": torch.__version__}

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
