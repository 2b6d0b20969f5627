"""/v1/embeddings as OpenAI has it, and /v1/rerank as Jina and Cohere have it.

A language model's hidden state at the last token, or the mean over all tokens, scaled to length 1,
represents the text. Models trained for it do far better than one trained to write.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import to_json

from stage01_forward.params import SamplingParams

from .errors import ApiError
from .protocol import MOST_PROMPTS, Body, Many, Prompts, Text, as_list
from .scoring import EmbeddedRequest
from .service import Service

Vector = list[float]


class _Pooled(Body):
    model: str | None = None
    pooling: Literal["last", "mean"] = "last"  # not in OpenAI's: which hidden states to take


class EmbeddingBody(_Pooled):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class RerankBody(_Pooled):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[Many[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True


def written(vectors: Sequence[Vector], encoding: str) -> list[bytes]:
    """The JSON of each vector by itself: other threads run between two."""
    items: list[bytes] = []
    for index, vector in enumerate(vectors):
        shown: Any = vector
        if encoding == "base64":  # what OpenAI's client asks for by default
            shown = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        items.append(to_json({"object": "embedding", "index": index, "embedding": shown}))
    return items


def ranking(body: RerankBody, model: str, vectors: Sequence[Vector], tokens: int) -> bytes:
    """The answer of /v1/rerank. vectors: of the query, and of the documents."""
    query, *rest = vectors
    scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in rest]
    order = sorted(range(len(rest)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    return to_json({"model": model, "usage": {"total_tokens": tokens}, "results": results})


def endpoints(state: Any, unless_gone: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Both endpoints by path, each behind its body. `state.service` answers them; `unless_gone`
    ends the work for a client that leaves."""

    async def embedded(
        request: Request, texts: Sequence[str | list[int]], field: str, body: _Pooled
    ) -> tuple[list[Vector], int]:
        """The embeddings of `texts`, which are in `field` of the body, and how many tokens they
        have. Raises ApiError for a text that is empty or too long."""
        service: Service = state.service
        engine, salt = service.engine, request.scope["tenant"] + service.check_model(body.model)
        prompts = await service.all_prompt_ids(texts, field)
        for ids in prompts:
            service.check_ids(ids, field)
        if not engine.engine.embeds:
            raise ApiError(400, "This engine has no hidden states to embed: use --engine paged.")
        wants = partial(EmbeddedRequest, mean=body.pooling == "mean")
        groups = engine.submit(prompts, [SamplingParams(max_tokens=1)], salt, wants)
        tickets = [ticket for (ticket,) in groups]

        async def vectors() -> list[Vector]:
            return [await engine.result(ticket) for ticket in tickets]

        try:
            async with asyncio.timeout(service.timeout):
                return await unless_gone(request, vectors()), sum(map(len, prompts))
        finally:
            for ticket in tickets:
                engine.abort(ticket)

    async def embeddings(request: Request, body: EmbeddingBody) -> Response:
        service: Service = state.service
        width = service.loaded.config.n_embd
        if body.dimensions not in (None, width):
            message = f"This model's embeddings have {width} dimensions, and cannot be shortened."
            raise ApiError(400, message, "dimensions")
        vectors, tokens = await embedded(request, as_list(body.input), "input", body)
        # Millions of numbers: written off the event loop.
        items = await service.in_turn(written, vectors, body.encoding_format)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        rest = to_json({"object": "list", "model": service.name, "usage": usage})
        answer = b'%b,"data":[%b]}' % (rest.removesuffix(b"}"), b",".join(items))
        return Response(answer, media_type="application/json")

    async def rerank(request: Request, body: RerankBody) -> Response:
        service: Service = state.service
        texts = [body.query, *body.documents]
        vectors, tokens = await embedded(request, texts, "documents", body)
        answer = await service.in_turn(ranking, body, service.name, vectors, tokens)
        return Response(answer, media_type="application/json")

    return {"/v1/embeddings": (EmbeddingBody, embeddings), "/v1/rerank": (RerankBody, rerank)}
