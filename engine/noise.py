"""Noise for drawing tokens, as a function of (seed, position, token) and of nothing else.

Counter-based: no state is kept, so a sequence that continues on another worker, in another batch or after
a preemption meets the same noise. The key is SplitMix64 (Steele, Lea and Flood, 2014) of seed and
position; a token's bits are the key mixed with its number by two rounds of a 32-bit finalizer of the
MurmurHash3 shape (multipliers by Ettinger's search for low bias).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(bits: int) -> int:
    """The 32-bit integer that torch stores for these bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def keys(draws: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Of (seed, position) pairs: `[draws, 2]`, int32."""
    words = [_splitmix(_splitmix(seed & _MASK) ^ position) for seed, position in draws]
    pairs = [(_signed(word & 0xFFFFFFFF), _signed(word >> 32)) for word in words]
    return torch.tensor(pairs, dtype=torch.int32, device=device).view(-1, 2)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 `[draws, tokens]`; `tokens` is int32, `[tokens]` or `[draws, tokens]`.

    The token of the largest logit plus noise is a draw from the softmax (Gumbel, 1954).
    """
    bits = tokens * _signed(0x9E3779B1) + keys[:, :1]
    bits = _mix(bits).bitwise_xor_(keys[:, 1:])
    # 23 bits and a half fit a float32 exactly: never 0 or 1, so both logarithms are finite.
    uniform = ((_mix(bits) >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """Every bit of the input reaches every bit of the output; int32, wrapping. Changes its argument."""
    # torch shifts a signed integer arithmetically: the masks make the shifts logical.
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x21F0AAAD
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(0xD35A2D97)
    bits ^= (bits >> 15) & 0x1FFFF
    return bits
