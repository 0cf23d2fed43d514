"""Errors as the OpenAI API writes them, and those that only HTTP knows. Pure."""

from __future__ import annotations

import math

import msgspec

from fleet.errors import BadRequest, FleetError, Internal, NotFound, Overloaded, Unauthorized, Unavailable

Headers = list[tuple[bytes, bytes]]


class ModelNotFound(NotFound):
    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        shown = model if len(model) <= 100 else model[:100] + "…"
        super().__init__(f"there is no model {shown!r}; there are: {', '.join(known) or 'none yet'}")


class MethodNotAllowed(FleetError):
    http_status = 405
    kind = "invalid_request_error"

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed for {path}; use {allowed}")
        self.allowed = allowed


class WrongMediaType(FleetError):
    http_status = 415
    kind = "invalid_request_error"


class SlowBody(FleetError):
    http_status = 408
    kind = "invalid_request_error"


class HeadersTooLarge(FleetError):
    http_status = 431
    kind = "invalid_request_error"


def error_object(error: FleetError) -> dict[str, object]:
    """What stands under "error", in a response as in a stream."""
    param = error.param if isinstance(error, BadRequest) else None
    code = error.code if isinstance(error, BadRequest) else None
    if isinstance(error, ModelNotFound):
        param, code = "model", "model_not_found"
    elif isinstance(error, Unauthorized):
        code = "invalid_api_key"
    return {"message": error.message, "type": error.kind, "param": param, "code": code}


def error_body(error: FleetError) -> bytes:
    return msgspec.json.encode({"error": error_object(error)})


def error_event(error: FleetError) -> bytes:
    """The last event of a stream that failed; no `[DONE]` follows, as nothing is done."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: FleetError) -> Headers:
    if isinstance(error, (Overloaded, Unavailable)):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", error.allowed.encode())]
    return []


def defect() -> Internal:
    """For an exception nobody expected: its text is for the log, not for a client."""
    return Internal("the server met an error of its own; its log has the details")
