"""Workloads: who asks for how much and when, drawn from a seed or read from a trace. Pure.

For the load generator and the simulator alike. A workload is a stream of conversations in the order of their
first questions; most have one turn. A prompt is told in pieces: equal keys are equal tokens, so that prefixes
are shared as they were in the trace, and whoever plays the workload makes tokens or words of them.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens, the same in every prompt in which its key is the same."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation. Its prompt is all that was said before, and `adds`."""

    adds: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0
    """From the end of the answer before until this is asked, seconds; 0 for the first turn."""

    @property
    def added_tokens(self) -> int:
        return sum(piece.tokens for piece in self.adds)


@dataclass(frozen=True, slots=True)
class Conversation:
    at_s: float
    """When its first turn is asked, seconds since the start."""
    turns: tuple[Turn, ...]
    service_class: str = ""
    """Class of objectives; empty: that of whoever asks."""

    def prompt(self, turn: int) -> tuple[Piece, ...]:
        """All pieces of that turn's prompt; earlier answers are pieces too, with keys of their own."""
        said: list[Piece] = []
        for number, earlier in enumerate(self.turns[: turn + 1]):
            said += earlier.adds
            if number < turn:
                said.append(Piece(f"answer {earlier.adds[-1].key}", earlier.output_tokens))
        return tuple(said)

    def prompt_tokens(self, turn: int) -> int:
        before = sum(one.added_tokens + one.output_tokens for one in self.turns[:turn])
        return before + self.turns[turn].added_tokens


MOST_TOKENS = 10_000_000
"""Of a prompt or an answer: more was never meant, and would take all memory there is."""


def _checked(name: str, value: Any, most: float, unit: str) -> None:
    """ValueError: no number that could be meant."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r}; a number of 0 to {most:g} {unit} is possible")


def _exp(power: float) -> float:
    """As large as a number can be, not an error."""
    return math.exp(min(power, 700.0))


# How much: distributions of lengths and times.


@dataclass(frozen=True, slots=True)
class Amount:
    """A distribution of token counts, of turns or of seconds, never outside [least, most]."""

    kind: str
    """constant | uniform | normal | lognormal | exponential"""
    first: float
    """The constant; the lower end; the mean; the median; the mean."""
    second: float = 0.0
    """-; the upper end; the standard deviation; the standard deviation of the logarithm; -"""
    least: float = 0.0
    most: float = math.inf

    def __post_init__(self) -> None:
        if self.kind not in _AMOUNTS:
            raise ValueError(f"{self.kind!r} is no distribution; known are {', '.join(_AMOUNTS)}")
        if not (0 <= self.first < math.inf and 0 <= self.second < math.inf):
            raise ValueError(f"{self.kind} of {self.first:g} and {self.second:g} is not possible: at least 0")
        if self.kind == "uniform" and self.second < self.first:
            raise ValueError(f"uniform:{self.first:g},{self.second:g} ends before it begins")
        if not self.least <= self.most:
            raise ValueError(f"no amount is at least {self.least:g} and at most {self.most:g}")

    @classmethod
    def parse(cls, text: str) -> Amount:
        """`256`, `100..500` (uniform), `normal:256,64`, `lognormal:200,0.8`, `exponential:5`; each may end
        with its bounds, as in `lognormal:200,0.8@16..2000`. Raises `ValueError` with what is wrong."""
        main, _, bounds = text.strip().partition("@")
        least, most = _range(bounds, text) if bounds else (0.0, math.inf)
        if ".." in main:
            return cls("uniform", *_range(main, text), least, most)
        name, colon, numbers = main.partition(":")
        try:
            values = [float(number) for number in (numbers if colon else main).split(",")]
        except ValueError:
            values = []
        kind = name if colon else "constant"
        if not values or len(values) != _AMOUNTS.get(kind, len(values)):
            raise ValueError(
                f"{text!r} is no amount: write 256, 100..500, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA "
                "or exponential:MEAN, and bounds, if any, behind it as @LEAST..MOST"
            )
        return cls(kind, values[0], values[1] if len(values) > 1 else 0.0, least, most)

    def __str__(self) -> str:
        """What `parse` understands."""
        numbers = ",".join(f"{one:g}" for one in (self.first, self.second)[: _AMOUNTS[self.kind]])
        text = numbers if self.kind == "constant" else f"{self.kind}:{numbers}"
        return text if (self.least, self.most) == (0, math.inf) else f"{text}@{self.least:g}..{self.most:g}"

    @property
    def mean(self) -> float:
        """Of the distribution without its bounds."""
        match self.kind:
            case "uniform":
                return (self.first + self.second) / 2
            case "lognormal":
                return self.first * _exp(self.second**2 / 2)
            case _:
                return self.first

    def draw(self, noise: np.random.Generator) -> float:
        match self.kind:
            case "constant":
                value = self.first
            case "uniform":
                value = noise.uniform(self.first, self.second)
            case "normal":
                value = noise.normal(self.first, self.second)
            case "lognormal":
                value = self.first * _exp(noise.normal(0.0, self.second))
            case _:
                value = noise.exponential(self.first)
        return float(min(max(value, self.least), self.most))

    def count(self, noise: np.random.Generator) -> int:
        """A whole number, at least one."""
        return max(1, round(self.draw(noise)))


_AMOUNTS = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}


def _range(text: str, whole: str) -> tuple[float, float]:
    low, _, high = text.partition("..")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(f"{whole!r} is no amount: a range is written LEAST..MOST") from None


# When: arrivals.


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When conversations begin."""

    rate: tuple[tuple[float, float], ...]
    """(second, rate a second) points, joined by straight lines; the last rate stays."""
    cv: float = 1.0
    """Coefficient of variation of the gaps, which are gamma distributed: 0 an even beat, 1 Poisson, above 1
    bursts (BurstGPT, 2024, finds 1 to 3 and more in production)."""

    def __post_init__(self) -> None:
        seconds = [second for second, _ in self.rate]
        if not self.rate or seconds[0] != 0 or any(after <= before for before, after in pairwise(seconds)):
            raise ValueError("the points of a rate begin at second 0 and go forward in time")
        if any(not 0 <= rate < math.inf for _, rate in self.rate) or not any(rate for _, rate in self.rate):
            raise ValueError("a rate is at least 0 at each point, and above it somewhere")
        if not 0 <= self.cv < math.inf:
            raise ValueError(f"cv is {self.cv}; a number of at least 0 is needed")

    @classmethod
    def steady(cls, rate: float, cv: float = 1.0) -> Arrivals:
        return cls(((0.0, rate),), cv)

    @classmethod
    def ramp(cls, first: float, last: float, seconds: float, cv: float = 1.0) -> Arrivals:
        return cls(((0.0, first), (seconds, last)), cv)

    def times(self, noise: np.random.Generator) -> Iterator[float]:
        """Without end, unless the last rate is 0. Gaps of mean one are drawn, and time runs through them as
        fast as the rate says (time change of a renewal process)."""
        # So even that no clock could tell is even.
        shape = 1 / self.cv**2 if self.cv > 1e-3 else 0.0
        due = 0.0
        # An even beat begins half a beat in, so that a stretch holds rate x time of them.
        gap = noise.gamma(shape, 1 / shape) if shape else 0.5
        segments = self._segments()
        start, seconds, rate, slope = next(segments)
        passed = 0.0
        while True:
            due += gap
            gap = noise.gamma(shape, 1 / shape) if shape else 1.0
            while due > passed + seconds * (rate + slope * seconds / 2):
                passed += seconds * (rate + slope * seconds / 2)
                following = next(segments, None)
                if following is None:
                    return
                start, seconds, rate, slope = following
            left = due - passed
            # rate·t + slope·t²/2 = left, in the form that is exact also where the slope is about 0.
            speed = math.sqrt(max(0.0, rate * rate + 2 * slope * left))
            yield start + (2 * left / (rate + speed) if left else 0.0)

    def _segments(self) -> Iterator[tuple[float, float, float, float]]:
        """(start, length, rate at the start, slope); the last is endless unless its rate is 0."""
        for (start, rate), (end, after) in pairwise(self.rate):
            yield start, end - start, rate, (after - rate) / (end - start)
        start, rate = self.rate[-1]
        if rate:
            # Not infinity, whose product with a slope of 0 is no number.
            yield start, 1e15, rate, 0.0


# What: mixes of requests that are drawn.


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of conversation in a mix."""

    prompt: Amount = Amount("constant", 256)
    """Tokens of a turn's own text, beside the shared prefix."""
    output: Amount = Amount("constant", 64)
    """Tokens of an answer."""
    share: float = 1.0
    """Of all conversations, relative to the other kinds."""
    service_class: str = ""
    prefix_tokens: int = 0
    """Tokens of the system prompt that a first turn begins with; 0: none."""
    prefixes: int = 1
    """How many different system prompts there are."""
    popularity: float = 0.0
    """The n-th system prompt is asked for in proportion to n^-popularity: 0 all alike, about 1 as pages on
    the web are (Zipf)."""
    turns: Amount = Amount("constant", 1)
    think: Amount = Amount("exponential", 5.0)
    """Seconds from an answer's end to the next question of a conversation."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < math.inf or self.prefix_tokens < 0 or self.prefixes < 1:
            raise ValueError(f"{self} is not possible")
        for name, count in (
            ("prompt", min(self.prompt.mean, self.prompt.most)),
            ("output", min(self.output.mean, self.output.most)),
            ("prefix_tokens", self.prefix_tokens),
        ):
            _checked(name, count, MOST_TOKENS, "tokens")


def drawn(arrivals: Arrivals, kinds: Sequence[Kind], seed: int) -> Iterator[Conversation]:
    """Conversations without end. Arrivals, and each kind, have noise of their own: another rate asks the same
    questions at other times."""
    shares = np.array([kind.share for kind in kinds], dtype=float)
    if not shares.sum() > 0:
        raise ValueError("the shares of a mix add up to nothing")
    bounds = np.cumsum(shares / shares.sum())
    choice = _noise(seed, "choice")
    noises = [_noise(seed, f"kind {number}") for number in range(len(kinds))]
    popular = [_popularity(kind) for kind in kinds]
    for number, at_s in enumerate(arrivals.times(_noise(seed, "arrivals"))):
        chosen = min(int(np.searchsorted(bounds, choice.uniform(), side="right")), len(kinds) - 1)
        kind, noise = kinds[chosen], noises[chosen]
        prefix: tuple[Piece, ...] = ()
        if kind.prefix_tokens:
            which = int(np.searchsorted(popular[chosen], noise.uniform(), side="right"))
            prefix = (Piece(f"{seed} prefix {chosen} {which}", kind.prefix_tokens),)
        turns = []
        for turn in range(kind.turns.count(noise)):
            own = Piece(f"{seed} {number} {turn}", kind.prompt.count(noise))
            think_s = kind.think.draw(noise) if turn else 0.0
            turns.append(Turn((*prefix, own) if turn == 0 else (own,), kind.output.count(noise), think_s))
        yield Conversation(at_s, tuple(turns), kind.service_class)


def _noise(seed: int, what: str) -> np.random.Generator:
    return np.random.default_rng([seed, *what.encode()])


def _popularity(kind: Kind) -> np.ndarray[Any, np.dtype[np.float64]]:
    weights = np.arange(1, kind.prefixes + 1, dtype=float) ** -kind.popularity
    bounds = np.cumsum(weights / weights.sum())
    bounds[-1] = 1.0
    return bounds


# Traces.


def trace(lines: Iterable[str], seed: int = 0) -> Iterator[Conversation]:
    """A trace in any known format, which its first line shows. Raises `ValueError` that names the line."""
    rows = iter(lines)
    first = next(rows, "").removeprefix("\ufeff")
    rows = chain([first], rows)
    if first.upper().startswith("TIMESTAMP,"):
        return azure(rows, seed)
    if '"hash_ids"' in first:
        return mooncake(rows, seed)
    if '"bh"' in first:
        return prefill_decode_log(rows, seed)
    raise ValueError(
        "unknown trace: its first line is neither TIMESTAMP,ContextTokens,GeneratedTokens (Azure) nor a JSON "
        "object with hash_ids (Mooncake) or bh (prefill/decode log)"
    )


_BIN_S = 3.0
MOONCAKE_BLOCK = 512
LOG_BLOCK = 1024


def mooncake(lines: Iterable[str], seed: int = 0) -> Iterator[Conversation]:
    """JSON lines {timestamp ms, input_length, output_length, hash_ids}, one id for each 512 tokens.

    Arrivals were recorded in bins of 3 s: those of one stamp are spread at random until the next stamp.
    """
    noise = _noise(seed, "bins")
    rows_of = _objects(lines, "timestamp", ("input_length", "output_length"), "hash_ids")
    bins = groupby(rows_of, key=lambda row: float(row["timestamp"]) / 1000)
    rows: list[Mapping[str, Any]] = []
    start, number = 0.0, 0
    for at_s, group in chain(bins, [(math.inf, iter(()))]):
        if at_s < start:
            raise ValueError(f"the trace goes back in time, from {start:g} s to {at_s:g} s")
        for offset, row in zip(sorted(noise.uniform(size=len(rows)).tolist()), rows, strict=True):
            # A stamp of its own is the moment itself.
            spread_s = min(at_s - start, _BIN_S) if len(rows) > 1 else 0.0
            total = max(1, int(row["input_length"]))
            # Without ids it shares nothing.
            ids = row["hash_ids"] or [f"of {number}"]
            number += 1
            pieces = _blocks(ids, MOONCAKE_BLOCK, total, seed)
            yield Conversation(start + offset * spread_s, (Turn(pieces, max(1, int(row["output_length"]))),))
        start, rows = at_s, list(group)


def prefill_decode_log(lines: Iterable[str], seed: int = 0) -> Iterator[Conversation]:
    """JSON lines {ts ms, il, ol, bh: one hash for each full 1,024 tokens, priority} of a serving P/D fleet.

    The class is `priority-N`. An answer of no tokens is one of one token: the prompt was computed.
    """
    for number, row in enumerate(_objects(lines, "ts", ("il", "ol"), "bh")):
        total = max(1, int(row["il"]))
        whole = (row["bh"] or [])[: total // LOG_BLOCK]
        pieces = _blocks(whole, LOG_BLOCK, len(whole) * LOG_BLOCK, seed)
        rest = total - len(whole) * LOG_BLOCK
        if rest:
            pieces += (Piece(f"{seed} rest {number}", rest),)
        turn = Turn(pieces, max(1, int(row["ol"])))
        service_class = f"priority-{int(row['priority'])}" if "priority" in row else ""
        yield Conversation(float(row["ts"]) / 1000, (turn,), service_class)


def azure(lines: Iterable[str], seed: int = 0) -> Iterator[Conversation]:
    """CSV TIMESTAMP,ContextTokens,GeneratedTokens: lengths only; no prompt shares anything with another."""
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines)):
        try:
            # Seven digits of a second there; six here.
            at = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", row["TIMESTAMP"].strip()))
            start = at if start is None else start
            at_s = (at - start).total_seconds()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            _checked("TIMESTAMP", at_s, _LAST_S, "s since the first line")
            _checked("ContextTokens", prompt, MOST_TOKENS, "tokens")
            _checked("GeneratedTokens", output, MOST_TOKENS, "tokens")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number + 2} of the trace: {error}") from None
        turn = Turn((Piece(f"{seed} row {number}", max(1, prompt)),), max(1, output))
        yield Conversation(at_s, (turn,))


_LAST_S = 366 * 86_400.0


def _objects(
    lines: Iterable[str], at: str, counts: Sequence[str], blocks: str
) -> Iterator[Mapping[str, Any]]:
    """Rows with their moment, in ms since the trace began, numbers of tokens and names of blocks."""
    needed = (at, *counts, blocks)
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("no JSON object")
                missing = [name for name in needed if name not in row]
                if missing:
                    raise ValueError(f"without {', '.join(missing)}")
                _checked(at, row[at], _LAST_S * 1000, "ms since the trace began")
                for count in counts:
                    _checked(count, row[count], MOST_TOKENS, "tokens")
                if not isinstance(row[blocks], list | None):
                    raise ValueError(f"{blocks} is no list")
            except ValueError as error:
                raise ValueError(f"line {number} of the trace: {error}") from None
            yield row


def _blocks(hashes: Sequence[Any], size: int, total: int, seed: int) -> tuple[Piece, ...]:
    """The last block holds what is left of the prompt, be it more or less than a block."""
    pieces = [Piece(f"{seed} block {one}", size) for one in hashes[: max(1, math.ceil(total / size))]]
    rest = total - size * (len(pieces) - 1)
    if pieces and rest != size:
        pieces[-1] = Piece(pieces[-1].key, rest)
    return tuple(pieces)


# Cutting a workload to what one has.


@dataclass(frozen=True, slots=True)
class Shape:
    """What is made of a workload before it is played."""

    speed: float = 1.0
    """How many times faster than recorded it comes; pauses for thought are as they are."""
    skip_s: float = 0.0
    """What begins before is left out, seconds of the workload's own time."""
    duration_s: float = math.inf
    """What would begin later than this is left out, seconds as it is played."""
    conversations: int | None = None
    """Most conversations; None: all."""
    length_scale: float = 1.0
    """Factor on all token counts of prompts and answers: a trace of long prompts for a small model."""
    prompt_limit: int | None = None
    """Longest prompt, tokens: the beginning is kept, which is what is shared. Later turns that would exceed
    it are left out."""
    output_limit: int | None = None
    """Longest answer, tokens."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Class in the workload → class that is asked for."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf or not 0 < self.length_scale < math.inf:
            raise ValueError("speed and length_scale are numbers above 0")
        if any(limit is not None and limit < 1 for limit in (self.prompt_limit, self.output_limit)):
            raise ValueError("a limit of tokens is at least 1")

    def of(self, workload: Iterable[Conversation]) -> Iterator[Conversation]:
        taken = 0
        for one in workload:
            if one.at_s < self.skip_s:
                continue
            at_s = (one.at_s - self.skip_s) / self.speed
            if at_s > self.duration_s or taken == self.conversations:
                return
            taken += 1
            name = self.classes.get(one.service_class, one.service_class)
            yield Conversation(at_s, tuple(self._turns(one.turns)), name)

    def _turns(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        said = 0
        for number, turn in enumerate(turns):
            pieces = [self._scaled(piece) for piece in turn.adds]
            output = max(1, round(turn.output_tokens * self.length_scale))
            if self.output_limit is not None:
                output = min(output, self.output_limit)
            if self.prompt_limit is not None:
                if number and said + sum(piece.tokens for piece in pieces) > self.prompt_limit:
                    return
                pieces = list(_beginning(pieces, self.prompt_limit - said))
            said += sum(piece.tokens for piece in pieces) + output
            yield replace(turn, adds=tuple(pieces), output_tokens=output)

    def _scaled(self, piece: Piece) -> Piece:
        return Piece(piece.key, max(1, round(piece.tokens * self.length_scale)))


def _beginning(pieces: Iterable[Piece], limit: int) -> Iterator[Piece]:
    for piece in pieces:
        if limit <= 0:
            return
        yield piece if piece.tokens <= limit else Piece(piece.key, limit)
        limit -= piece.tokens
