"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, small, and free of what is ours."""

from __future__ import annotations

from typing import Any

from .protocol import LONGEST_STOP, MOST_PROMPTS, MOST_STOPS, NOT_UNICODE, ErrorBody, ErrorInfo

LONGEST_MESSAGE = (
    300  # characters, of at most 6 bytes: an error must not make a large answer of a small request
)
TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 405: "MethodNotAllowedError",
    408: "RequestTimeoutError", 413: "RequestTooLargeError", 500: "InternalServerError", 503: "ServiceUnavailableError",
    504: "TimeoutError",
}  # fmt: skip

# Where these may be of several kinds, pydantic says only why a value is not the first of them.
KINDS = {
    "prompt": f"send some text, or token ids, or a list of at most {MOST_PROMPTS} of either, none of them empty",
    "stop": f"send a text, or a list of at most {MOST_STOPS}, each of 1 to {LONGEST_STOP} characters",
}


class ApiError(Exception):
    """An answer that is an error."""

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
    """The body of an answer with `status`, and of an event that ends a stream."""
    message = message.encode("utf-8", "replace").decode()[:LONGEST_MESSAGE]
    name = TYPES.get(status, "APIError")
    return ErrorBody(
        error=ErrorInfo(message=message, type=name, param=param, code=status)
    ).model_dump()


def validation_message(errors: list[Any]) -> tuple[str, str | None]:
    """One sentence on the first thing that is wrong with a body, and the field; never what the client had written there."""
    first = (
        max(errors, key=lambda error: len(error["loc"]))
        if errors
        else {"loc": (), "msg": "it cannot be read"}
    )
    field = next((str(part) for part in first["loc"][1:] if isinstance(part, str)), None)
    if first.get("type") == "json_invalid":
        return (
            "The body is not JSON: send a JSON object, with the header Content-Type: application/json.",
            None,
        )
    what = f"'{field[:64]}'" if field else "The body"
    if any(error.get("type") == NOT_UNICODE for error in errors):
        return (
            f"{what}: it has half of a surrogate pair, which is no character: send whole ones.",
            field,
        )
    kinds = (
        KINDS.get(field or "") if len(first["loc"]) > 2 else None
    )  # behind the field, the kind that was tried
    reason = kinds or str(first["msg"]).removeprefix("Value error, ")
    return (
        f"{what}: {reason}." if field else f"{what} is not what this endpoint takes: {reason}.",
        field,
    )
