"""Draws tokens on the device: temperature, top-k, top-p, min-p and the counter-based noise, in few launches.

The tokens are those of `engine.sampler`. A cut is found by search over the bits of the logit at which it
lies, so nothing is sorted: for logits scaled to at most 0, the bits of a float's magnitude order as the
floats do. What is computed is in `reference.draw_tokens`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Logits a program looks at together."""

_PARTS = 16
"""Programs that share a row, at most."""


@triton.jit
def _mix(bits):
    bits ^= bits >> 16
    bits *= 0x21F0AAAD
    bits ^= bits >> 15
    bits *= 0xD35A2D97
    bits ^= bits >> 15
    return bits


@triton.jit
def _gumbel(low, high, tokens):
    """`noise.gumbel`, bit for bit up to the logarithms."""
    bits = _mix(tokens.to(tl.uint32) * 0x9E3779B1 + low)
    bits = _mix(bits ^ high) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _peaks(logits, tops, places, sums, l_row, vocabulary, span, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Of a part of a row: the largest logit (NaN if one is), where it is first, the sum of exponentials."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = tl.full([TILE], float("-inf"), dtype=tl.float32)
    place = tl.full([TILE], 0x7FFFFFFF, dtype=tl.int32)
    total = tl.zeros([TILE], dtype=tl.float32)
    wrong = tl.zeros([TILE], dtype=tl.int32)
    first = part * span
    end = tl.minimum(first + span, vocabulary)
    for start in range(first, end, TILE):
        tokens = start + tl.arange(0, TILE)
        values = tl.load(logits + row * l_row + tokens, mask=tokens < end, other=float("-inf"))
        wrong |= (values != values).to(tl.int32)
        higher = values > most
        highest = tl.where(higher, values, most)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(most - base) + tl.exp(values - base)
        place = tl.where(higher, tokens, place)
        most = highest
    top = tl.max(most, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(sums + row * PARTS + part, tl.sum(total * tl.exp(most - base), 0))
    tl.store(places + row * PARTS + part, tl.min(tl.where(most == top, place, 0x7FFFFFFF), 0))
    tl.store(tops + row * PARTS + part, tl.where(tl.max(wrong, 0) > 0, float("nan"), top))


@triton.jit
def _peak(tops, row, PARTS: tl.constexpr):
    """The largest logit of a row. NaN is not larger than anything: whoever tells it looks for it."""
    return tl.max(tl.load(tops + row * PARTS + tl.arange(0, PARTS)), 0)


@triton.jit
def _above(logits, base, heat, vocabulary, bounds, WEIGHED: tl.constexpr, TILE: tl.constexpr):
    """Of the logits strictly above the values with these bits: how many, or the sum of their weights."""
    found = tl.zeros([TILE, 8], dtype=tl.float32)
    for start in range(0, vocabulary, TILE):
        tokens = start + tl.arange(0, TILE)
        values = tl.load(logits + tokens, mask=tokens < vocabulary, other=float("-inf"))
        scaled = tl.div_rn(values - base, heat)
        weight = tl.exp(scaled) if WEIGHED else tl.full([TILE], 1.0, dtype=tl.float32)
        bits = tl.abs(scaled).to(tl.int32, bitcast=True)
        found += tl.where(bits[:, None] < bounds[None, :], weight[:, None], 0.0)
    return tl.sum(found, 0)


@triton.jit
def _search(logits, base, heat, vocabulary, most, WEIGHED: tl.constexpr, TILE: tl.constexpr):
    """The largest bits below which there is less than `most`: three bits a look at the row."""
    cut = 0
    for look in range(11):
        # Seven bounds and the one that is known to do.
        step = tl.arange(0, 8) << (30 - 3 * look)
        bounds = cut + step if look > 0 else tl.minimum(tl.arange(0, 8), 1) << 30
        good = (_above(logits, base, heat, vocabulary, bounds, WEIGHED, TILE) < most) & (bounds <= 0x7F800000)
        cut = tl.max(tl.where(good | (bounds == cut), bounds, 0), 0)
    return cut


@triton.jit
def _cut(logits, tops, heats, top_k, top_p, cuts, l_row, vocabulary, PARTS: tl.constexpr, TILE: tl.constexpr):
    """The bits of the smallest scaled logit that top-k and top-p leave in a row."""
    row = tl.program_id(0).to(tl.int64)
    heat, k, p = tl.load(heats + row), tl.load(top_k + row), tl.load(top_p + row)
    base = _peak(tops, row, PARTS)
    cut = 0x7F800000
    limited = (k > 0) & (k < vocabulary)
    if (heat > 0.0) & (limited | (p < 1.0)):
        at = logits + row * l_row
        if limited:
            cut = _search(at, base, heat, vocabulary, k.to(tl.float32), False, TILE)
        if p < 1.0:
            here = tl.full([8], 0, dtype=tl.int32) + cut
            total = tl.max(_above(at, base, heat, vocabulary, here, True, TILE), 0)
            if limited:
                # Ties at the k-th place count as often as k leaves room for them.
                count = tl.max(_above(at, base, heat, vocabulary, here, False, TILE), 0)
                total += (k.to(tl.float32) - count) * tl.exp(-tl.cast(cut, tl.float32, bitcast=True))
            cut = tl.minimum(cut, _search(at, base, heat, vocabulary, p * total, True, TILE))
    tl.store(cuts + row, cut)


@triton.jit
def _race(
    logits, tops, heats, least, keys, cuts, winners, places, l_row, vocabulary, span,
    PARTS: tl.constexpr, TILE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The largest of logit plus noise in a part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(heats + row)
    if heat <= 0.0:
        return
    base = _peak(tops, row, PARTS)
    low = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    floor = tl.load(least + row)
    cut = 0x7F800000
    if CUT:
        cut = tl.load(cuts + row)
    most = tl.full([TILE], float("-inf"), dtype=tl.float32)
    place = tl.full([TILE], 0x7FFFFFFF, dtype=tl.int32)
    first = part * span
    end = tl.minimum(first + span, vocabulary)
    for start in range(first, end, TILE):
        tokens = start + tl.arange(0, TILE)
        values = tl.load(logits + row * l_row + tokens, mask=tokens < end, other=float("-inf"))
        scaled = tl.div_rn(values - base, heat)
        kept = scaled >= floor
        if CUT:
            kept = kept & (tl.abs(scaled).to(tl.int32, bitcast=True) <= cut)
        noisy = tl.where(kept, scaled + _gumbel(low, high, tokens), float("-inf"))
        higher = noisy > most
        most = tl.where(higher, noisy, most)
        place = tl.where(higher, tokens, place)
    top = tl.max(most, 0)
    tl.store(winners + row * PARTS + part, top)
    tl.store(places + row * PARTS + part, tl.min(tl.where(most == top, place, 0x7FFFFFFF), 0))


@triton.jit
def _finish(
    tops, top_places, sums, heats, winners, win_places, tokens, best, totals,
    PARTS: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = row * PARTS + tl.arange(0, PARTS)
    values = tl.load(tops + parts)
    top = tl.max(values, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    wrong = tl.max((values != values).to(tl.int32), 0) > 0
    tl.store(best + row, tl.where(wrong, float("nan"), top))
    shares = tl.where(values == values, tl.exp(values - base), 0.0)
    tl.store(totals + row, base + tl.log(tl.sum(tl.load(sums + parts) * shares, 0)))
    token = tl.min(tl.where(values == top, tl.load(top_places + parts), 0x7FFFFFFF), 0)
    if RANDOM:  # noqa: SIM102 - this one is decided when it is compiled
        if tl.load(heats + row) > 0.0:
            noisy = tl.load(winners + parts)
            token = tl.min(tl.where(noisy == tl.max(noisy, 0), tl.load(win_places + parts), 0x7FFFFFFF), 0)
    tl.store(tokens + row, token.to(tl.int64))


def draw_tokens(
    logits: Tensor,
    heat: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    least: Tensor,
    keys: Tensor,
    *,
    random: bool = True,
    cut: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.draw_tokens`, without a word to the host.

    `random` false: no row has heat; `cut` false: no row has top-k or top-p. Each spares launches.
    """
    rows, vocabulary = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} of strides {logits.stride()}; wanted float32, side by side"
        )
    device = logits.device
    tile = min(_TILE, triton.next_power_of_2(vocabulary))
    parts = min(_PARTS, triton.next_power_of_2(triton.cdiv(vocabulary, tile)))
    span = triton.cdiv(triton.cdiv(vocabulary, parts), tile) * tile
    tops, sums, winners = torch.empty(3, rows, parts, dtype=torch.float32, device=device)
    places, win_places = torch.empty(2, rows, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    best, totals = torch.empty(2, rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens, best, totals
    shape = {"PARTS": parts, "TILE": tile, "num_warps": 8}
    _peaks[(rows, parts)](logits, tops, places, sums, logits.stride(0), vocabulary, span, **shape)
    if random:
        cuts = places
        if cut:
            cuts = torch.empty(rows, dtype=torch.int32, device=device)
            _cut[(rows,)](
                logits, tops, heat, top_k, top_p, cuts, logits.stride(0), vocabulary,
                PARTS=parts, TILE=tile, num_warps=16,
            )  # fmt: skip
        _race[(rows, parts)](
            logits, tops, heat, least, keys, cuts, winners, win_places,
            logits.stride(0), vocabulary, span, CUT=cut, **shape,
        )  # fmt: skip
    _finish[(rows,)](
        tops, places, sums, heat, winners, win_places, tokens, best, totals,
        PARTS=parts, RANDOM=random, num_warps=1,
    )  # fmt: skip
    return tokens, best, totals
