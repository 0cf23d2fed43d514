"""What is asked of one router: totals since its start, told each second to whoever plans. Pure.

Totals, not rates: a message that is lost changes nothing, and who comes late begins from what it hears first.
"""

from __future__ import annotations

import msgspec

from fleet.ids import Incarnation

MOST_CLASSES = 64
"""Classes that one message may name."""


class ClassDemand(msgspec.Struct, frozen=True):
    """Requests of one class."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    arrived: int = 0
    attained: int = 0
    missed: int = 0
    missed_ttft: int = 0
    """Of those, the ones that missed the time to the first token, or never came so far: refused for load, or
    no worker was there."""
    missed_tpot: int = 0
    """Of those, the ones that missed an objective between tokens."""


class Demand(msgspec.Struct, frozen=True):
    """One router, now and since its start."""

    router: str
    life: Incarnation
    sequence: int
    up_s: float
    """For how long it has been counting."""
    arrived: int = 0
    prompt_tokens: int = 0
    """Of those that arrived."""
    prompt_squares: float = 0.0
    """Sum of the squares of their prompts' lengths: what their spread follows from."""
    ended: int = 0
    """Answers that are over and had a token."""
    ended_tokens: int = 0
    """Prompt tokens of those."""
    cached_tokens: int = 0
    """Of their prompt tokens, found in a cache."""
    output_tokens: int = 0
    """Of those answers."""
    rejected: int = 0
    """Refused for load, or because nobody was there to serve them."""
    waiting: int = 0
    """Requests here that no worker has yet."""
    waiting_tokens: int = 0
    """Of their prompts."""
    held: int = 0
    """Of those that wait, the ones for which there is no worker at all."""
    running: int = 0
    """Requests under way, those that wait included."""
    classes: dict[str, ClassDemand] = {}


def encode_demand(demand: Demand) -> bytes:
    return msgspec.json.encode(demand)


def decode_demand(data: bytes) -> Demand:
    """ValueError: it cannot be read, or claims what cannot be."""
    try:
        demand = msgspec.json.decode(data, type=Demand)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not what a router asks: {error}") from None
    if len(demand.classes) > MOST_CLASSES:
        raise ValueError(f"{len(demand.classes)} classes in one message; at most {MOST_CLASSES}")
    numbers = [demand.up_s, demand.arrived, demand.prompt_tokens, demand.waiting, demand.running]
    if min(numbers) < 0:
        raise ValueError("a total below zero")
    return demand


def demand_subject(fleet: str, life: str = "*") -> str:
    return f"pdfleet.{fleet}.demand.{life}"
