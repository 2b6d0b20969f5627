"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from shared.errors import UserError

from .async_engine import Broken, EngineDead, Overloaded, log
from .protocol import LONGEST_STOP, MOST_PROMPTS, MOST_STOPS, NOT_UNICODE, WrongField

LONGEST_MESSAGE = 300  # characters of up to 6 bytes: a small request must not get a large error
LATE = (
    "The request took longer than the server allows: ask for fewer tokens, or raise "
    "--request-timeout."
)
NOT_AN_OBJECT = "The body is not a JSON object: send one, as application/json."
REFUSALS = {
    404: "This path does not exist: /openapi.json lists those that do.",
    405: "This path does not allow this method.",
    413: "The body exceeds a megabyte: send a shorter one.",
    415: "The body is encoded: send plain JSON, without the header Content-Encoding.",
}
# Where several kinds of value are valid, pydantic only explains why a value is not the first kind.
KINDS = {
    "prompt": f"send text or token ids, or a list of at most {MOST_PROMPTS} of either, none empty",
    "stop": f"send a text, or a list of at most {MOST_STOPS} texts, "
    f"each 1 to {LONGEST_STOP} characters long",
}


class ApiError(Exception):
    """An error that becomes the answer to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

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


def validation_message(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The first of pydantic's errors as one sentence, and its field; never the value that was
    sent."""
    first = max(errors, key=lambda error: len(error["loc"]))
    place = first["loc"][first["loc"][:1] == ("body",) :]  # where FastAPI has read it
    field = next((part for part in place if isinstance(part, str)), None)
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, WrongField):
        field = reason.field
    if first["type"] == "json_invalid" or field is None:
        return NOT_AN_OBJECT, None
    what = f"'{field[:64]}'"
    if any(error["type"] == NOT_UNICODE for error in errors):
        return f"{what} contains half of a surrogate pair: send whole characters.", field
    # After the field, "loc" names the kind of value that was tried.
    kinds = KINDS.get(field) if len(place) > 1 else None
    reason = kinds or str(first["msg"]).removeprefix("Value error, ")
    return f"{what}: {reason}.", field
