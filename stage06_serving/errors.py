"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from shared.errors import UserError

from .async_engine import Broken, EngineDead, Overloaded, log
from .protocol import (
    LONGEST_STOP,
    MOST_PROMPTS,
    MOST_STOPS,
    NOT_UNICODE,
    ErrorBody,
    ErrorInfo,
    WrongField,
)

LONGEST_MESSAGE = 300  # characters of up to 6 bytes: a small request must not get a large error
LATE = (
    "The request took longer than the server allows: ask for fewer tokens, or raise "
    "--request-timeout."
)
NOT_AN_OBJECT = "The body is not a JSON object: send one, as application/json."
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
# Where several kinds of value are valid, pydantic only explains why a value is not the first kind.
PROMPTS = f"send text or token ids, or a list of at most {MOST_PROMPTS} of either, none empty"
KINDS = {
    "prompt": PROMPTS,
    "input": PROMPTS,
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
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers or {}

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an answer with `status`, or the event that ends a stream."""
    message = message.encode("utf-8", "replace").decode()[:LONGEST_MESSAGE]
    name = TYPES.get(status, "APIError")
    info = ErrorInfo(message=message, type=name, param=param, code=status)
    return ErrorBody(error=info).model_dump()


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


def validation_message(errors: list[Any]) -> tuple[str, str | None]:
    """The first of pydantic's errors as one sentence, and its field; never the value that was
    sent."""
    unreadable: dict[str, Any] = {"loc": (), "msg": "it cannot be read"}
    first = max(errors, key=lambda error: len(error["loc"]), default=unreadable)
    field = next((str(part) for part in first["loc"] if isinstance(part, str)), None)
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, WrongField):
        field = reason.field
    if field is None and first.get("type") in (
        "json_invalid",
        "model_attributes_type",
        "model_type",
    ):
        return NOT_AN_OBJECT, None
    what = f"'{field[:64]}'" if field else "The body"
    if any(error.get("type") == NOT_UNICODE for error in errors):
        return f"{what} contains half of a surrogate pair: send whole characters.", field
    # After the field, "loc" names the kind of value that was tried.
    kinds = KINDS.get(field or "") if len(first["loc"]) > 1 else None
    reason = kinds or str(first["msg"]).removeprefix("Value error, ")
    return (f"{what}: {reason}." if field else f"The body is invalid: {reason}."), field
