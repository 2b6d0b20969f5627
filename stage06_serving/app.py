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
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from shared import registry
from stage05_paged.blockmap import blockmap

from .access import Door, Keys
from .async_engine import CLOSING, AsyncEngine, EngineDead, EngineThread, Step
from .chat import Simple, template_of
from .errors import ANSWERS, ApiError, failure
from .formats import Completion, Format, Generate
from .loading import Served
from .metrics import Metrics
from .protocol import CompletionBody, GenerateBody, TokenizeBody
from .service import Generation, Service
from .settings import Settings

PAGE = Path(__file__).with_name("page.html")
STEPS = 256  # of the page's chart
MOST_BLOCKS = 2**12  # on the page's map, the first ones
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


async def failed(request: Request, error: Exception) -> Response:
    """The answer to any error, in the form that OpenAI's clients expect."""
    return failure(error).response()


def create_app(served: Served, settings: Settings, thread: EngineThread) -> FastAPI:
    """The server's application, with the engine of `served`, which runs on `thread`."""
    loaded, created, numbers = served.selection.loaded, int(time.time()), count(1)
    engine = AsyncEngine(served.engine, settings.max_queue, thread)
    template, steps = template_of(loaded), deque[dict[str, Any]](maxlen=STEPS)
    forms = registry.load(registry.FORMS["json"])(served.engine, loaded, template)
    service = Service(engine, loaded, template, forms, settings.request_timeout, served.defaults)
    drafts = getattr(served.engine.scheduler, "draft_counts", None)  # of a later stage
    counters = Metrics(engine, service.name, drafts)

    def record(step: Step, *_: Any) -> None:
        if step.shares:
            counts = step.prefill_tokens, step.decode_tokens, round(1000 * step.seconds, 1)
            steps.append({"number": next(numbers), "counts": counts, "rows": step.shares})

    engine.listeners.append(record)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(
        title="Staircase",
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from another site
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the host that the client chose
    )
    app.state.engine = engine
    for kind in (ApiError, RequestValidationError, HTTPException, *ANSWERS):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(Exception, failed)
    app.add_middleware(Door)
    # No other name: the page of another site could have its own resolve to this server's address.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts, www_redirect=False)
    Tenant = Annotated[bytes, Depends(Keys(settings.keys))]

    class Chats(forms.chat_body):  # type: ignore[name-defined]
        """POST /v1/chat/completions, with the fields of a later stage."""

    @app.post("/generate")
    async def generate(request: Request, body: GenerateBody, tenant: Tenant) -> Response:
        generation = await service.generate(body, tenant)
        return await respond(request, generation, Generate)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody, tenant: Tenant) -> Response:
        generation = await unless_gone(request, service.complete(body, tenant))
        return await respond(request, generation, Completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: Chats, tenant: Tenant) -> Response:
        generation = await unless_gone(request, service.chat(body, tenant))
        return await respond(request, generation, forms.answer)

    @app.post("/v1/responses", include_in_schema=False)
    async def responses(tenant: Tenant) -> Response:
        raise ApiError(404, NO_RESPONSES)

    @app.get("/v1/models/{name:path}")
    async def model(name: str, tenant: Tenant) -> dict[str, Any]:
        service.check_model(name)
        about = {"id": service.name, "object": "model", "created": created}
        about |= {"owned_by": "staircase", "max_model_len": service.context}
        return about | {"chat": not isinstance(template, Simple)}  # for the page

    @app.get("/v1/models")
    async def models(tenant: Tenant) -> dict[str, Any]:
        return {"object": "list", "data": [await model(service.name, tenant)]}

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeBody, tenant: Tenant) -> dict[str, Any]:
        service.check_model(body.model)
        ids = await unless_gone(request, service.encode(body.prompt))
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests can be answered. If not, only a restart helps."""
        if not engine.alive:
            raise ApiError(503, "The engine has stopped: restart the server.")
        return {"status": "draining" if engine.draining else "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """Whether requests are accepted, for a router."""
        if engine.draining:
            raise EngineDead(CLOSING)
        return await health()

    @app.get("/metrics")
    async def metrics(tenant: Tenant) -> Response:
        return Response(generate_latest(counters.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live")
    async def live(tenant: Tenant, after: int = 0) -> dict[str, Any]:
        """What the page draws beside the chat: the blocks now, and the steps after number
        `after`."""
        blocks = await engine.call(lambda engine: blockmap(engine.scheduler)[:MOST_BLOCKS])
        runs = [(state, len(list(run))) for state, run in groupby(blocks)]
        newer = [step for step in steps if step["number"] > after]
        return {**asdict(engine.status), "map": runs, "waiting": engine.waiting, "steps": newer}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE, media_type="text/html")

    return app
