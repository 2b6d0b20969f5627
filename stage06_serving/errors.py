"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.errors import UserError

from .async_engine import Broken, EngineDead, Overloaded, log
from .protocol import WrongField

LONGEST_MESSAGE = 300  # characters of up to 6 bytes: a small request must not get a large error
LATE = "The request took longer than the server's --request-timeout: ask for fewer tokens."
NOT_AN_OBJECT = "The body is not a JSON object: send one, as application/json."
ANSWERS: dict[type[Exception], tuple[int, dict[str, str]]] = {  # status and headers
    UserError: (400, {}),
    Broken: (500, {}),
    Overloaded: (503, {"Retry-After": "1"}),
    EngineDead: (503, {"Retry-After": "5"}),
    TimeoutError: (504, {"x-should-retry": "false"}),  # a retry would double the work
}
WRONG_TYPE = "no value of this type is valid: /openapi.json describes those that are"


@dataclass(eq=False)
class ApiError(Exception):
    """An error that becomes the answer to a request."""

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        """Of an answer, or the event that ends a stream."""
        message = self.message.encode("utf-8", "replace").decode()[:LONGEST_MESSAGE]
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": message, "type": kind}
        return {"error": {**error, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def failure(error: Exception) -> ApiError:
    """The answer to a request that failed with `error`; a defect of ours is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, RequestValidationError):
        return ApiError(400, *validation_message(error.errors()))
    for kind, (status, headers) in ANSWERS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error) or LATE, headers=headers)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server failed to answer this request: see its log for the reason.")


def validation_message(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The most telling of pydantic's errors as one sentence, and its field; never the value that
    was sent."""
    # Where several kinds of value are valid, pydantic also says that a value is not of the others.
    precise = [error for error in errors if not error["type"].endswith("_type")]
    first = max(precise or errors, key=lambda error: len(error["loc"]))
    place = first["loc"][first["loc"][:1] == ("body",) :]  # where FastAPI has read it
    field = next((part for part in place if isinstance(part, str)), None)
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, WrongField):
        field = reason.field
    if first["type"] == "json_invalid" or field is None:
        return NOT_AN_OBJECT, None
    several = not precise and len(errors) > 1
    message = WRONG_TYPE if several else str(first["msg"]).removeprefix("Value error, ")
    return f"'{field[:64]}': {message}.", field
