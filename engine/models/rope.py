"""Rotary positions and their scalings, all brought to one form: a scale a frequency, and a magnitude.

Su et al., 2021. Scalings: linear (Chen et al., 2023), Llama 3's, YaRN (Peng et al., 2023), LongRoPE (Ding et
al., 2024). Two models whose `Rope` is equal turn heads alike, however their configurations spell it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from fleet.errors import BadRequest

MOST_POSITIONS = 1 << 22
"""Longest sequence that is laid out; more is a mistake in a configuration, and would take gigabytes."""


@dataclass(frozen=True, slots=True)
class Rope:
    kind: str
    theta: float
    head_dim: int
    turned: int
    """Numbers of each head that are turned; the others stay as they are."""
    scales: tuple[float, ...] = ()
    """`[turned / 2]`: what each frequency is multiplied by; empty: by 1."""
    magnitude: float = 1.0
    """What cosines and sines are multiplied by."""

    def table(self, positions: int) -> Tensor:
        """Cosines, then sines: `[positions, head_dim]`, float32. A pair that is not turned has 1 and 0."""
        powers = torch.arange(0, self.turned, 2, dtype=torch.float32) / self.turned
        frequencies = 1.0 / self.theta**powers
        if self.scales:
            frequencies *= torch.tensor(self.scales, dtype=torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        still = torch.zeros(positions, (self.head_dim - self.turned) // 2)
        cosines, sines = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return torch.cat((cosines, still + 1.0, sines, still), dim=1)

    def order(self) -> list[int] | None:
        """Which number of a head goes where, so that the pairs to turn are (i, i + head_dim / 2) although not
        all are turned; None: they are so already. Scores are the same in any order that queries and keys
        share."""
        if self.turned == self.head_dim:
            return None
        half, still = self.turned // 2, (self.head_dim - self.turned) // 2
        ranges = (0, half), (2 * half, 2 * half + still), (half, 2 * half), (2 * half + still, self.head_dim)
        return [place for first, last in ranges for place in range(first, last)]

    def __str__(self) -> str:
        scales = blake2b(repr(self.scales).encode(), digest_size=4).hexdigest() if self.scales else "1"
        return (
            f"{self.kind} theta={self.theta} turned={self.turned}/{self.head_dim} scales={scales} "
            f"magnitude={self.magnitude}"
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    """Of one rope, as config.json has them."""

    given: dict[str, Any]
    kind: str
    theta: float
    turned: int
    longest: int
    """max_position_embeddings."""
    original: int
    """Longest sequence of the training before the scaling."""

    def number(self, key: str, otherwise: float | None = None) -> float:
        value = self.given.get(key)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"rotary scaling {self.kind!r} has no number {key}")
        number = float(value)
        if not math.isfinite(number):
            raise BadRequest(f"rotary scaling {self.kind!r} has {key} {value}; it must be finite")
        return number

    @property
    def factor(self) -> float:
        factor = self.number("factor", self.longest / self.original)
        if factor <= 0:
            raise BadRequest(f"rotary scaling {self.kind!r} has factor {factor}; it must be above 0")
        return factor

    @property
    def half(self) -> int:
        return self.turned // 2


_Scaling = tuple[tuple[float, ...], float, int]
"""Scales, magnitude, and the longest sequence for which they are exact."""


def _plain(settings: _Settings) -> _Scaling:
    return (), 1.0, settings.longest


def _dynamic(settings: _Settings) -> _Scaling:
    """Up to max_position_embeddings it is the plain kind. Beyond, each longer sequence would turn all its
    keys anew, also those in a cache: so that is the longest sequence."""
    return (), 1.0, settings.longest


def _linear(settings: _Settings) -> _Scaling:
    settings.number("factor")
    return (1.0 / settings.factor,) * settings.half, 1.0, settings.longest


def _llama3(settings: _Settings) -> _Scaling:
    """Long wavelengths are stretched by the factor, short ones stay, between them it goes over smoothly."""
    settings.number("factor")
    factor = settings.factor
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if not 0 < low < high:
        raise BadRequest(
            f"rotary scaling 'llama3' has low_freq_factor {low} and high_freq_factor {high}; "
            "they must be above 0, and the second the larger one"
        )
    scales = []
    for place in range(settings.half):
        turns = settings.original * settings.theta ** (-2 * place / settings.turned) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        scales.append((1 - smooth) / factor + smooth)
    return tuple(scales), 1.0, settings.longest


def _yarn(settings: _Settings) -> _Scaling:
    """Equations 18 to 22. A configuration whose max_position_embeddings is that of before the scaling, as
    when the scaling is added by hand, is served up to the stretched length."""
    factor, turned = settings.factor, settings.turned

    def place(turns: float) -> float:
        angle = math.log(settings.original / (turns * 2 * math.pi))
        return turned * angle / (2 * math.log(settings.theta))

    fast, slow = settings.number("beta_fast", 32), settings.number("beta_slow", 1)
    if fast <= 0 or slow <= 0:
        raise BadRequest(
            f"rotary scaling 'yarn' has beta_fast {fast} and beta_slow {slow}; both must be above 0"
        )
    low, high = place(fast), place(slow)
    if settings.given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    high += 0.001 if low == high else 0.0
    scales = []
    for index in range(settings.half):
        stretched = min(1.0, max(0.0, (index - low) / (high - low)))
        scales.append(stretched / factor + 1 - stretched)

    def strength(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    magnitude = strength(1.0)
    if settings.given.get("mscale") and settings.given.get("mscale_all_dim"):
        magnitude = strength(settings.number("mscale")) / strength(settings.number("mscale_all_dim"))
    longest = max(settings.longest, int(factor * settings.original))
    return tuple(scales), settings.number("attention_factor", magnitude), longest


def _longrope(settings: _Settings) -> _Scaling:
    """The factors for short sequences, and no sequence longer than those. A longer one turns all its keys by
    other factors, also those that were cached while it was short, so both cannot be exact at once."""
    factors = settings.given.get("short_factor")
    if not isinstance(factors, list) or len(factors) != settings.half:
        raise BadRequest(f"rotary scaling 'longrope' wants {settings.half} numbers as short_factor")
    factor, magnitude = settings.factor, 1.0
    if factor > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(settings.original))
    if not all(isinstance(number, int | float) and number > 0 for number in factors):
        raise BadRequest("rotary scaling 'longrope' has a short_factor that is no number above 0")
    scales = tuple(1.0 / float(number) for number in factors)
    longest = min(settings.longest, settings.original)
    return scales, settings.number("attention_factor", magnitude), longest


_KINDS: dict[str, Callable[[_Settings], _Scaling]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def read_rope(
    given: dict[str, Any], *, head_dim: int, longest: int, original: int | None = None, partial: bool = False
) -> tuple[Rope, int]:
    """A rope and the longest sequence for which it is exact; BadRequest names what is not supported.

    `given`: one entry of `rope_parameters`, with rope_theta. `longest`: max_position_embeddings; `original`:
    that of before the scaling, where the configuration has it outside of `given`. `partial`: whether the
    architecture can turn a part of each head only.
    """
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in _KINDS:
        raise BadRequest(f"rotary scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    part = float(given.get("partial_rotary_factor") or 1.0)
    if part != 1.0 and not partial:
        raise BadRequest(f"partial_rotary_factor {part} is not supported for this architecture")
    turned = int(head_dim * part)
    if turned % 2 or head_dim % 2 or not 0 < turned <= head_dim:
        raise BadRequest(f"{turned} of {head_dim} numbers of a head cannot be turned in pairs")
    theta = given["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1.0 < theta < 1e30:
        raise BadRequest(f"rope_theta is {theta}; it must be a number above 1 and below 1e30")
    before = original or given.get("original_max_position_embeddings") or longest
    if isinstance(before, bool) or not isinstance(before, int | float) or not 1 <= before <= MOST_POSITIONS:
        raise BadRequest(
            f"original_max_position_embeddings is {before}; it must be from 1 to {MOST_POSITIONS}"
        )
    settings = _Settings(
        given=given,
        kind=kind,
        theta=float(theta),
        turned=turned,
        longest=longest,
        original=int(before),
    )
    scales, magnitude, exact = _KINDS[kind](settings)
    if exact > MOST_POSITIONS:
        raise BadRequest(
            f"rotary scaling {kind!r} reaches {exact} positions; at most {MOST_POSITIONS} can be served"
        )
    return Rope(kind, settings.theta, head_dim, turned, scales, magnitude), exact
