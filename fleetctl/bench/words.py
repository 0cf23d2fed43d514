"""The words of the load generator: whom it asks, what one request came to, and what a run found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fleet.errors import BadRequest
from fleet.goodput import End, Outcome


@dataclass(frozen=True, slots=True)
class Server:
    """The server that is measured."""

    url: str
    """Base URL, with or without /v1."""
    model: str = ""
    """Empty: the first that the server lists."""
    chat: bool = True
    """/v1/chat/completions, else /v1/completions."""
    api_key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with each request."""
    class_header: str = "x-slo-class"
    """Header that names a request's class of objectives; servers that know none pass over it."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each body, such as a temperature."""
    timeout_s: float = 300.0
    """After this a request is given up, from its sending on."""
    connect_timeout_s: float = 10.0
    """Of that, the longest for a connection to be made."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # half an IPv6 address, or a port that is no number
            known = False
        if not known:
            raise BadRequest(
                f"{self.url!r} is no base URL; one looks like http://127.0.0.1:8000", param="url"
            )
        for name, value in (*self.headers.items(), ("Authorization", self.api_key), (self.class_header, "")):
            if any(letter in name + value for letter in "\r\n\0"):
                raise BadRequest(f"header {name!r} cannot be sent: it holds a line break", param="header")

    @property
    def path(self) -> str:
        """Of the API, without a slash at its end."""
        path = urlsplit(self.url).path.rstrip("/")
        return path if path.endswith("/v1") else f"{path}/v1"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request did not finish."""

    kind: str
    """Few values, to be counted by: `connect`, `reset`, `timeout`, `http 503`, `stream rate_limit_error`."""
    message: str = ""


@dataclass(slots=True)
class Record:
    """What became of one request. Times in seconds since the run's start, unless said otherwise."""

    conversation: int
    turn: int
    service_class: str
    due_s: float
    """When it was to be sent."""
    asked_tokens: int
    """Tokens of the prompt as the workload wants it, without a chat template."""
    wanted_tokens: int
    """Tokens of the answer that were asked for."""
    sent_s: float = 0.0
    """When its sending began: what the outcome's times count from."""
    outcome: Outcome | None = None
    """None: it is still running."""
    failure: Failure | None = None
    prompt_tokens: int | None = None
    """As the server counted them, and so the next two."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    request_id: str = ""
    retried: bool = False
    """Sent again, because the kept connection had been closed by the server meanwhile."""

    @property
    def lag_s(self) -> float:
        """By how much the generator itself was late."""
        return self.sent_s - self.due_s

    def as_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "conversation": self.conversation,
            "turn": self.turn,
            "class": self.service_class or None,
            "due_s": round(self.due_s, 6),
            "sent_s": round(self.sent_s, 6),
            "asked_tokens": self.asked_tokens,
            "wanted_tokens": self.wanted_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "request_id": self.request_id or None,
        }
        if self.outcome is not None:
            told |= {key: value for key, value in self.outcome.as_dict().items() if key != "stages"}
            told["times_s"] = [round(at, 6) for at in self.outcome.times]
        if self.failure is not None:
            told |= {"error": self.failure.kind, "message": self.failure.message}
        return {key: value for key, value in told.items() if value is not None}


_ENDS = {408: End.TIMED_OUT, 429: End.REJECTED, 504: End.TIMED_OUT}


def end_of_status(status: int) -> End:
    """What an HTTP status other than 200 is to goodput. 4xx is the request's own fault."""
    return _ENDS.get(status, End.INVALID if 400 <= status < 500 else End.FAILED)


_KINDS = {
    "rate_limit_error": End.REJECTED,
    "rate_limit_exceeded": End.REJECTED,
    "overloaded_error": End.REJECTED,
    "timeout": End.TIMED_OUT,
    "timeout_error": End.TIMED_OUT,
    "deadline_exceeded": End.TIMED_OUT,
    "invalid_request_error": End.INVALID,
}


def end_of_error(error: Mapping[str, Any]) -> End:
    """The same for the `error` object of an event in a stream that had begun with 200."""
    for said in (error.get("code"), error.get("status")):
        if isinstance(said, int) and 400 <= said < 600:
            return end_of_status(said)
    return _KINDS.get(str(error.get("type")), _KINDS.get(str(error.get("code")), End.FAILED))
