"""Errors, by what the caller can do about them; one table to gRPC and HTTP status. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class FleetError(Exception):
    """Something a caller is told. `message` says what was wrong and what would be right."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    kind: ClassVar[str] = "server_error"
    """OpenAI's `error.type`."""
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed on another worker."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(FleetError):
    """The caller must change the request."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BadConstraint(BadRequest):
    """What the answer is to form cannot be enforced, or not within the limits."""


class Unauthorized(FleetError):
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    kind = "authentication_error"


class NotFound(FleetError):
    """No such model, worker or route."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    kind = "invalid_request_error"


class TooLarge(BadRequest):
    """More bytes than the limit it names."""

    http_status = 413


class Overloaded(FleetError):
    """Nothing is wrong; come back later, or try another worker."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "rate_limit_error"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(FleetError):
    """No worker can serve this now."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "service_unavailable"
    retryable = True
    retry_after_s: ClassVar[float] = 10.0
    """What a client is told to wait: time for a small worker to be started again. Clients of OpenAI's own
    come twice more after it, and by themselves only for a second or two."""


class WorkerLost(Unavailable):
    """The worker died, froze or was cut off while it held the request."""


class LeaseExpired(Unavailable):
    """KV that was promised is gone; compute the prompt again."""


class TransferFailed(Unavailable):
    """KV did not arrive whole and proven; compute the prompt again."""


class DeadlineExceeded(FleetError):
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    kind = "timeout_error"


class Internal(FleetError):
    """A defect of ours; the text never holds more than its cause."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    grpc: str
    http: int
    error: type[FleetError]


ERRORS: dict[str, ErrorRow] = {
    error.__name__: ErrorRow(error.grpc_status, error.http_status, error)
    for error in (
        BadRequest,
        BadConstraint,
        Unauthorized,
        NotFound,
        TooLarge,
        Overloaded,
        Unavailable,
        WorkerLost,
        LeaseExpired,
        TransferFailed,
        DeadlineExceeded,
        Internal,
    )
}
"""Every error that crosses a wire, by name."""


def error_named(name: str, message: str, retry_after_s: float = 0.0) -> FleetError:
    """The error a peer named; an unknown name is `Internal`, so that a newer peer harms nobody."""
    row = ERRORS.get(name)
    error = (row.error if row else Internal)(message)
    if isinstance(error, Overloaded) and retry_after_s > 0:
        error.retry_after_s = retry_after_s
    return error
