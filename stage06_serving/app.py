"""The endpoints: OpenAI's, vLLM's, and a plain one. What a body means is in protocol.py, what is done with it in service.py."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.cli import Loaded
from shared.errors import UserError
from stage01_forward.sampling import Logprobs

from .async_engine import AsyncEngine, Broken, EngineDead, EngineThread, Overloaded, log
from .chat import ChatTemplate
from .engines import AnyEngine
from .errors import ApiError, error_body, validation_message
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
from .service import Answer, Choice, Piece, Service, number, tenant, usage
from .settings import Settings
from .sse import DONE, EventStream, event

VERSION = "staircase stage06"
LARGEST_BODY = 2**20  # bytes
SLOWEST_BODY = 30  # seconds: who sends a byte now and then would hold a connection for ever
OPEN = ("/health", "/")  # paths that need no key: the page asks for one
PAGE = Path(__file__).with_name("page.html")
LATE = "The request took longer than the server allows: ask for fewer tokens, or raise --request-timeout."
Echo = tuple[str, dict[str, list[Any]] | None]  # a prompt's text and its log-probabilities
Result = TypeVar("Result")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 500, 503, 504)
}  # as /openapi.json has them


class Guard:
    """Looks at every request before anything else does: its key, its size, and whether its body is JSON.

    The path is the one that was sent. `request.url` is put together from the Host header, which the client chooses.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = ()) -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key if scheme.lower() == b"bearer" else b""
        scope["tenant"] = tenant(key.decode("latin-1")) if self.digests else b""
        error = None
        if self.digests and scope["path"] not in OPEN and not self._known(key):
            error = ApiError(
                401, "The API key is missing or wrong: send the header 'Authorization: Bearer KEY'."
            )
        elif (
            scope["method"] == "POST"
            and headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            != b"application/json"
        ):
            # A page on another site may send other types to us without asking first.
            error = ApiError(
                400, "The body must be JSON: send the header 'Content-Type: application/json'."
            )
        if error is None:
            try:
                async with asyncio.timeout(SLOWEST_BODY):
                    body = await self._body(receive)
            except TimeoutError:
                error = ApiError(
                    408, f"The body took longer than {SLOWEST_BODY} s to arrive: send it faster."
                )
            else:
                if body is None:
                    return  # the client has left
                if len(body) <= LARGEST_BODY:
                    await self.app(scope, _replay(body, receive), send)
                    return
                error = ApiError(413, f"The body is over {LARGEST_BODY} bytes: send a shorter one.")
        await JSONResponse(error.body(), error.status)(scope, receive, send)

    def _known(self, key: bytes) -> bool:
        given = hashlib.sha256(key).digest()
        same = [
            secrets.compare_digest(given, digest) for digest in self.digests
        ]  # always all of them, in equal time
        return any(same)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, or the first bytes of one that is too large; None if the client leaves before its end."""
        body = b""
        while len(body) <= LARGEST_BODY:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that has been read already, and then goes on as the real one."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def failure(error: BaseException) -> ApiError:
    """The answer that an error becomes. What nobody foresaw is logged, and its words stay here."""
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
    if isinstance(error, TimeoutError):  # a client that sends it again doubles the work
        return ApiError(504, LATE, headers={"x-should-retry": "false"})
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server failed at this request; its log says why.")


async def until(items: AsyncGenerator[Any, None], deadline: float) -> AsyncGenerator[Any, None]:
    """`items`, but none later than `deadline` (the loop's time). Raises TimeoutError."""
    async with aclosing(items) as arriving:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(arriving)
            except StopAsyncIteration:
                return
            yield item


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves: nobody would read it. Raises ApiError then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client has left.")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Api:
    """The endpoints that answer with text, streaming or not. One object for the life of the server."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def respond(
        self,
        request: Request,
        choices: Sequence[Choice],
        deadline: float,
        streams: bool,
        whole: Callable[[Sequence[Answer]], dict[str, Any]],
        chunks: Callable[[Choice, Piece], list[dict[str, Any]]],
        last: Callable[[], list[dict[str, Any]]],
    ) -> Response:
        """Send `choices`, which the engine has, as one body or as a stream of `chunks` and, behind them, the `last` ones;
        all by `deadline` (the loop's time)."""
        if streams:
            return EventStream(
                self._events(choices, deadline, chunks, last),
                lambda: self._release(choices),
                deadline,
            )

        async def answer() -> Response:
            answers = [Answer() for _ in choices]
            async for choice, piece in until(self.service.merged(choices), deadline):
                answers[choice.index].add(piece)
            return JSONResponse(whole(answers))

        try:
            return await unless_gone(request, answer())
        finally:
            self._release(choices)

    def deadline(self) -> float:
        """Until when (the loop's time) a request that comes now is to be answered."""
        return asyncio.get_running_loop().time() + self.service.timeout

    def _release(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self.service.engine.abort(choice.ticket)

    async def _events(
        self,
        choices: Sequence[Choice],
        deadline: float,
        chunks: Callable[[Choice, Piece], list[dict[str, Any]]],
        last: Callable[[], list[dict[str, Any]]],
    ) -> AsyncIterator[str]:
        try:
            async for choice, piece in until(self.service.merged(choices), deadline):
                for chunk in chunks(choice, piece):
                    yield event(chunk)
            for chunk in last():
                yield event(chunk)
        except Exception as error:  # the status has been sent: the stream itself must say it
            yield event(failure(error).body())
        yield DONE

    # ---- /generate --------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, body: GenerateBody) -> Response:
        choices = await self.service.generate(body, request.scope["tenant"])

        def whole(answers: Sequence[Answer]) -> dict[str, Any]:
            answer = answers[0]
            return {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "usage": usage(choices),
            }

        def chunks(choice: Choice, piece: Piece) -> list[dict[str, Any]]:
            if piece.finish_reason is None:
                return [{"text": piece.text}] if piece.text else []
            return [
                {"text": piece.text, "finish_reason": piece.finish_reason, "usage": usage(choices)}
            ]

        return await self.respond(
            request, choices, self.deadline(), bool(body.stream), whole, chunks, list
        )

    # ---- /v1/completions --------------------------------------------------------------------------------------------

    async def complete(self, request: Request, body: CompletionBody) -> Response:
        service, n = self.service, body.n or 1
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }
        deadline = self.deadline()
        if body.max_tokens == 0 and body.echo:
            return await self._score(request, body, head, deadline)
        choices = await service.complete(body, request.scope["tenant"])
        echoes: dict[int, Echo] = {}
        if body.echo:
            try:
                made = await self._echoes(
                    request, [choice.prompt_ids for choice in choices[::n]], body, deadline
                )
            except BaseException:
                self._release(choices)
                raise
            for choice in choices:
                echoes[choice.index] = made[choice.index // n]  # those of one prompt have the same
                choice.offset = len(made[choice.index // n][0])

        def one(choice: Choice, piece: Piece | Answer) -> dict[str, Any]:
            text, logprobs = piece.text, None
            if body.logprobs is not None:
                scored = [(token.id, token.logprobs) for token in piece.tokens]
                logprobs, choice.offset = self._logprobs(scored, choice.offset)
            if choice.index in echoes:  # before the first words
                before, prompt_logprobs = echoes.pop(choice.index)
                text = before + text
                if logprobs and prompt_logprobs:
                    logprobs = {key: prompt_logprobs[key] + logprobs[key] for key in logprobs}
            found = {
                "index": choice.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": piece.finish_reason,
            }
            if piece.stop_reason is not None:
                found["stop_reason"] = piece.stop_reason
            if body.return_token_ids:
                found["token_ids"] = [token.id for token in piece.tokens]
            return found

        def whole(answers: Sequence[Answer]) -> dict[str, Any]:
            made = [one(choice, answer) for choice, answer in zip(choices, answers, strict=True)]
            return {**head, "choices": made, "usage": usage(choices)}

        def chunks(choice: Choice, piece: Piece) -> list[dict[str, Any]]:
            made = one(choice, piece)
            if not (
                made["text"] or made["logprobs"] or made["finish_reason"] or body.return_token_ids
            ):
                return []  # all of it is held back
            return [{**head, "choices": [made], **self._running_usage(body, choices)}]

        def last() -> list[dict[str, Any]]:
            return [{**head, "choices": [], "usage": usage(choices)}] if body.include_usage else []

        return await self.respond(
            request, choices, deadline, bool(body.stream), whole, chunks, last
        )

    async def _echoes(
        self, request: Request, prompts: Sequence[list[int]], body: CompletionBody, deadline: float
    ) -> list[Echo]:
        """The text of each of `prompts` (ids), and its log-probabilities if asked for. Raises ApiError, TimeoutError."""
        tokenizer, top = self.service.loaded.tokenizer, body.logprobs
        texts = [text if isinstance(text, str) else tokenizer.decode(text) for text in body.prompts]
        if top is None:
            return [(text, None) for text in texts]
        self.service.check_scores(sum(len(ids) for ids in prompts), top)

        async def score() -> list[Echo]:
            made: list[Echo] = []
            for text, ids in zip(texts, prompts, strict=True):
                scores = await self.service.score(ids, top)
                found, _ = await asyncio.to_thread(
                    self._logprobs, list(zip(ids, scores, strict=True)), 0
                )  # thousands of texts
                made.append((text, found))
            return made

        async with asyncio.timeout_at(deadline):
            return await unless_gone(request, score())

    async def _score(
        self, request: Request, body: CompletionBody, head: dict[str, Any], deadline: float
    ) -> Response:
        """`echo` with no tokens: the prompts' own log-probabilities."""
        self.service.check_model(body.model)
        prompts = [await self.service.prompt_ids(prompt) for prompt in body.prompts]
        for ids in prompts:
            self.service.check_ids(ids)
        with self.service.engine.place(len(prompts)):
            echoes = await self._echoes(request, prompts, body, deadline)
        choices = [
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": "length"}
            for index, (text, logprobs) in enumerate(echoes)
        ]
        count = sum(len(ids) for ids in prompts)
        used = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
        whole = {**head, "choices": choices, "usage": used}
        if not body.stream:
            return JSONResponse(whole)

        async def events() -> AsyncIterator[str]:
            yield event({**head, "choices": choices})
            if body.include_usage:
                yield event({**head, "choices": [], "usage": used})
            yield DONE

        return EventStream(events(), lambda: None, deadline)

    def _logprobs(
        self, scored: Sequence[tuple[int, Logprobs | None]], offset: int
    ) -> tuple[dict[str, list[Any]], int]:
        """Tokens with their log-probabilities, as completions have them; and the offset of the text that comes next."""
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, logprobs in scored:
            text = self.service.token_text(token_id)
            likeliest = None
            if logprobs is not None:
                likeliest = {
                    self.service.token_text(each): number(value) for each, value in logprobs.top
                }
                likeliest.setdefault(text, number(logprobs.token))
            found["tokens"].append(text)
            found["token_logprobs"].append(None if logprobs is None else number(logprobs.token))
            found["top_logprobs"].append(likeliest)
            found["text_offset"].append(offset)
            offset += len(text)
        return found, offset

    def _running_usage(
        self, body: CompletionBody | ChatBody, choices: Sequence[Choice]
    ) -> dict[str, Any]:
        options = body.stream_options
        return (
            {"usage": usage(choices)}
            if options is not None and options.continuous_usage_stats
            else {}
        )

    # ---- /v1/chat/completions ---------------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatBody) -> Response:
        service = self.service
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
        }
        deadline = self.deadline()
        choices = await service.chat(body, request.scope["tenant"])
        greeted: set[int] = set()

        def logprobs(piece: Piece | Answer) -> dict[str, Any] | None:
            if not body.logprobs:
                return None
            return {
                "content": [
                    self._chat_logprob(token.id, token.logprobs)
                    for token in piece.tokens
                    if token.logprobs
                ]
            }

        def ending(piece: Piece | Answer) -> dict[str, Any]:
            end: dict[str, Any] = {"finish_reason": piece.finish_reason}
            return end | (
                {"stop_reason": piece.stop_reason} if piece.stop_reason is not None else {}
            )

        def whole(answers: Sequence[Answer]) -> dict[str, Any]:
            made = [
                {
                    "index": choice.index, "message": {"role": "assistant", "content": answer.text},
                    "logprobs": logprobs(answer), **ending(answer),
                }
                for choice, answer in zip(choices, answers, strict=True)
            ]  # fmt: skip
            return {**head, "object": "chat.completion", "choices": made, "usage": usage(choices)}

        def chunk(choice: Choice, delta: dict[str, Any], piece: Piece) -> dict[str, Any]:
            made = {
                "index": choice.index,
                "delta": delta,
                "logprobs": logprobs(piece),
                **ending(piece),
            }
            return {
                **head,
                "object": "chat.completion.chunk",
                "choices": [made],
                **self._running_usage(body, choices),
            }

        def chunks(choice: Choice, piece: Piece) -> list[dict[str, Any]]:
            made = []
            if choice.index not in greeted:
                greeted.add(choice.index)
                made.append(chunk(choice, {"role": "assistant", "content": ""}, Piece("", ())))
            if piece.text or piece.finish_reason or body.logprobs:
                made.append(chunk(choice, {"content": piece.text} if piece.text else {}, piece))
            return made

        def last() -> list[dict[str, Any]]:
            final = {
                **head,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": usage(choices),
            }
            return [final] if body.include_usage else []

        return await self.respond(
            request, choices, deadline, bool(body.stream), whole, chunks, last
        )

    def _chat_logprob(self, token_id: int, logprobs: Logprobs) -> dict[str, Any]:
        def one(each: int, value: float) -> dict[str, Any]:
            return {
                "token": self.service.token_text(each), "logprob": number(value), "bytes": self.service.token_bytes(each),
            }  # fmt: skip

        return {
            **one(token_id, logprobs.token),
            "top_logprobs": [one(*pair) for pair in logprobs.top],
        }


def create_app(
    engine: AnyEngine,
    loaded: Loaded,
    settings: Settings,
    template: ChatTemplate | None,
    thread: EngineThread | None = None,
) -> FastAPI:
    """The server's application. It owns `engine` from its start to its end, and runs it on `thread`, where it was made."""
    name = settings.served_model_name or loaded.config.name
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = AsyncEngine(engine, settings.max_queue, thread)
        app.state.engine = running
        app.state.service = Service(running, loaded, name, template, settings.request_timeout)
        app.state.api = Api(app.state.service)
        app.state.metrics = Metrics(running, name)
        app.state.live = Live(running)
        running.start()
        yield
        await running.drain(0)
        await running.stop()

    app = FastAPI(
        title="Staircase", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS,
        redirect_slashes=False,  # a redirect would name the host that the client has written
    )  # fmt: skip
    app.add_middleware(Guard, keys=settings.keys)
    state: Any = app.state

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, field = validation_message(list(error.errors()))
        return JSONResponse(error_body(400, message, field), 400)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        words = {404: "There is no such path here.", 405: "This path does not take this method."}
        return JSONResponse(
            error_body(
                error.status_code, words.get(error.status_code, "The request cannot be read.")
            ),
            error.status_code,
            error.headers,  # those of 405 say which methods there are
        )

    async def failed(request: Request, error: Exception) -> Response:
        answer = failure(error)
        return JSONResponse(answer.body(), answer.status, answer.headers)

    for kind in (ApiError, UserError, Overloaded, EngineDead, Broken, TimeoutError, Exception):
        app.add_exception_handler(kind, failed)

    @app.post("/generate", response_model=None)
    async def generate(request: Request, body: GenerateBody) -> Response:
        return await state.api.generate(request, body)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await state.api.complete(request, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await state.api.chat(request, body)

    def card() -> dict[str, Any]:
        context = state.service.context
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "staircase",
            "max_model_len": context,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        state.service.check_model(model_id)
        return card()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service: Service = state.service
        service.check_model(body.model)
        tokens = await service.encode(body.prompt)
        found = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
        return found | (
            {"token_strs": await service.token_texts(tokens)} if body.return_token_strs else {}
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service: Service = state.service
        service.check_model(body.model)
        service.check_ids(body.tokens)
        return {"prompt": service.loaded.tokenizer.decode(body.tokens)}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not state.engine.alive:
            raise ApiError(503, "The engine has stopped: restart the server.")
        return {"status": "draining" if state.engine.draining else "ok"}

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

    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE, media_type="text/html")

    return app
