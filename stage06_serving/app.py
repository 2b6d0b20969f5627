"""The endpoints: OpenAI's, vLLM's, and a plain one.

protocol.py describes their bodies, service.py does their work, and formats.py writes the answers.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from shared import registry
from shared.errors import UserError
from stage05_paged.blockmap import blockmap

from .access import Door, Keys
from .async_engine import CLOSING, AsyncEngine, Broken, EngineDead, EngineThread, Overloaded, Step
from .chat import Simple, template_of
from .errors import REFUSALS, ApiError, failure, validation_message
from .formats import Completion, Format, Generate
from .metrics import Metrics
from .protocol import ChatBody, CompletionBody, GenerateBody, TokenizeBody
from .service import Generation, Service
from .settings import Settings

if TYPE_CHECKING:
    from .choice import Served

PAGE = Path(__file__).with_name("page.html")
STEPS = 256  # of the page's chart
MOST_BLOCKS = 2**14  # on the page's map
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
NO_RESPONSES = "This server has no Responses API: send the messages to /v1/chat/completions."
Result = TypeVar("Result")


class EventStream(StreamingResponse):
    """Server-sent events as an iterator makes them. However they end, even before the first,
    `release` is called."""

    def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None]) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self.release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.release()


def event(data: dict[str, Any]) -> bytes:
    """One event with `data` as JSON: in ASCII, as for some clients U+2028 and U+0085 end a line."""
    return b"data: %b\n\n" % to_json(data, ensure_ascii=True)


async def events(generation: Generation, answer: Format) -> AsyncIterator[bytes]:
    """A streamed answer. A failure is reported in the stream: the status is sent already, and the
    official client takes a stream that just ends for a complete answer."""
    try:
        async for choice, piece in generation.pieces():
            if chunks := answer.chunks(choice, piece):
                yield b"".join(map(event, chunks))
        for chunk in answer.last():
            yield event(chunk)
    except Exception as error:
        yield event(failure(error).body())
    yield b"data: [DONE]\n\n"


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


async def respond(
    request: Request, generation: Generation, format: Callable[[Generation, Any], Format]
) -> Response:
    """The answer to a request that the engine has: a stream, or one body, in the endpoint's
    format."""
    try:
        answer = format(generation, generation.body)
        if generation.body.stream:
            return EventStream(events(generation, answer), generation.release)
        answers = await unless_gone(request, generation.whole())
        return JSONResponse(answer.whole(answers))
    except BaseException:
        generation.release()
        raise


def answer_errors(app: FastAPI) -> None:
    """Have all errors answered in the form that OpenAI's clients expect."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return ApiError(400, *validation_message(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = REFUSALS.get(error.status_code, "The request cannot be read.")
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def failed(request: Request, error: Exception) -> Response:
        return failure(error).response()

    for kind in (ApiError, UserError, Overloaded, EngineDead, Broken, TimeoutError, Exception):
        app.add_exception_handler(kind, failed)


def create_app(served: "Served", settings: Settings, thread: EngineThread | None = None) -> FastAPI:
    """The server's application, with the engine of `served`, which runs on `thread`."""
    loaded, created, numbers = served.loaded, int(time.time()), count(1)
    template, steps = template_of(loaded), deque[dict[str, Any]](maxlen=STEPS)
    forms = registry.load(registry.FORMS["json"])(served.engine, loaded, template)
    if TYPE_CHECKING:
        Chats: TypeAlias = ChatBody
    else:  # FastAPI reads bodies as this type, which has more fields
        Chats = forms.chat_body

    def record(step: Step, *_: Any) -> None:
        if step.shares:
            counts = step.prefill_tokens, step.decode_tokens, round(1000 * step.seconds, 1)
            steps.append({"number": next(numbers), "counts": counts, "rows": step.shares})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.engine = engine = AsyncEngine(served.engine, settings.max_queue, thread)
        options = settings.request_timeout, served.defaults
        state.service = Service(engine, loaded, template, forms, *options)
        state.metrics = Metrics(engine, loaded.config.name, served.drafts)
        engine.listeners.append(record)
        engine.start()
        yield
        await engine.drain(0)
        await engine.stop()

    app = FastAPI(
        title="Staircase",
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from another site
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the host that the client chose
    )
    state: Any = app.state
    state.engine = None
    answer_errors(app)
    app.add_middleware(Door)
    # No other name: the page of another site could have its own resolve to this server's address.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts, www_redirect=False)

    def service_of(request: Request) -> Service:
        service: Service = request.app.state.service
        return service

    Ready = Annotated[Service, Depends(service_of)]
    Tenant = Annotated[bytes, Depends(Keys(settings.keys))]

    @app.post("/generate")
    async def generate(
        request: Request, body: GenerateBody, service: Ready, tenant: Tenant
    ) -> Response:
        generation = await service.generate(body, tenant)
        return await respond(request, generation, Generate)

    @app.post("/v1/completions")
    async def completions(
        request: Request, body: CompletionBody, service: Ready, tenant: Tenant
    ) -> Response:
        generation = await unless_gone(request, service.complete(body, tenant))
        return await respond(request, generation, Completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: Chats, service: Ready, tenant: Tenant) -> Response:
        generation = await unless_gone(request, service.chat(body, tenant))
        return await respond(request, generation, service.forms.answer)

    @app.post("/v1/responses", include_in_schema=False)
    async def responses(tenant: Tenant) -> Response:
        raise ApiError(404, NO_RESPONSES)

    @app.get("/v1/models/{name:path}")
    async def model(name: str, service: Ready, tenant: Tenant) -> dict[str, Any]:
        service.check_model(name)
        about = {"id": service.name, "object": "model", "created": created}
        about |= {"owned_by": "staircase", "max_model_len": service.context}
        return about | {"chat": not isinstance(service.template, Simple)}  # for the page

    @app.get("/v1/models")
    async def models(service: Ready, tenant: Tenant) -> dict[str, Any]:
        return {"object": "list", "data": [await model(service.name, service, tenant)]}

    @app.post("/tokenize")
    async def tokenize(
        request: Request, body: TokenizeBody, service: Ready, tenant: Tenant
    ) -> Response:
        service.check_model(body.model)
        if body.messages is None:
            ids = await unless_gone(request, service.encode(body.prompt or ""))
        else:
            try:
                asked = Chats.model_validate(body.model_dump(exclude={"prompt"}))
            except ValidationError as error:
                raise ApiError(400, *validation_message(error.errors())) from None
            ids = await service.chat_ids(asked)
        fields = {"count": len(ids), "max_model_len": service.context, "tokens": ids}
        if body.return_token_strs:
            fields["token_strs"] = [service.loaded.tokenizer.decode([id]) for id in ids]
        return JSONResponse(fields)

    @app.get("/health")
    async def health(service: Ready) -> dict[str, Any]:
        """Whether requests can be answered. If not once the model is loaded, only a restart
        helps."""
        if not service.engine.alive:
            raise ApiError(503, "The engine has stopped: restart the server.")
        return {"status": "draining" if service.engine.draining else "ok"}

    @app.get("/ready")
    async def ready(service: Ready) -> dict[str, Any]:
        """Whether requests are accepted, for a router."""
        if service.engine.draining:
            raise EngineDead(CLOSING)
        return await health(service)

    @app.get("/metrics")
    async def metrics(service: Ready, tenant: Tenant) -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live")
    async def live(service: Ready, tenant: Tenant, after: int = 0) -> dict[str, Any]:
        """What the page draws beside the chat: the blocks now, and the steps after number
        `after`."""
        engine = service.engine
        blocks = await engine.call(lambda engine: blockmap(engine.scheduler)[:MOST_BLOCKS])
        runs = [(state, len(list(run))) for state, run in groupby(blocks)]
        newer = [step for step in steps if step["number"] > after]
        return {**asdict(engine.status), "map": runs, "waiting": engine.waiting, "steps": newer}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE, media_type="text/html")

    return app
