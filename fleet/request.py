"""What one request asks for, and how a request can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from fleet.ids import RequestId


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Noise is a function of (seed, position), so another worker draws the same."""

    max_tokens: int
    """Most tokens to generate, counted from the first one, wherever it was made."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """Always set: the ingress draws one where the client gave none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """End tokens of the model included, unless `ignore_eos`."""
    ignore_eos: bool = False
    logprobs: int = -1
    """-1: none; 0: of the drawn token; n: of the n most likely tokens too."""
    prompt_logprobs: int = -1
    """The same for each token of the prompt but the first. Such a prompt is computed, whatever is cached."""


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    """Any JSON object; no text."""
    JSON_SCHEMA = "json_schema"
    """Text: a JSON schema."""
    REGEX = "regex"
    GRAMMAR = "grammar"
    """Text: EBNF with a rule `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """Text: JSON of xgrammar's structural tag: free text in which tagged parts follow a schema."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the generated tokens must form. Compiled by the workers, who refuse what they cannot."""

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued, in tokens; text stays at the router."""

    id: RequestId
    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    salt: str = ""
    """Tenant salt of the block hashes; from authentication, never from a body."""
    adapter: str = ""
    priority: int = 0
    """Larger runs first."""
    deadline_s: float = 600.0
    """Seconds from acceptance by the ingress to the last token."""
    constraint: Constraint | None = None


class FinishReason(StrEnum):
    """How a sequence ended; the first two are good ends."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was found, not computed, on the worker that prefilled."""


class TokenLogprobs(Struct, frozen=True):
    """Log-probabilities at one position, natural log, after temperature-free softmax of the raw logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, best first."""
