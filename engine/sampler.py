"""Draws the next token of every row of logits; a row that asks for nothing special pays for nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import CDLL
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import noise
from engine.native.library import Unusable, native
from engine.staging import Landing, staging_of
from engine.words import Chunk
from fleet.request import TokenLogprobs

_LIST = 256
"""Most likely tokens looked at first where top-k or top-p cuts; more only if the cut lies beyond."""

_CACHED = 1 << 16
"""Numbers of noise that stay in a CPU's second level cache while they are made."""


_COLDEST = 1e-30
"""Temperatures below it, which float32 rounds to 0 at some point, draw the likeliest as 0 does."""

_LAST = -1e4
"""Added to the logit of an end token that is not wanted yet, where a constraint may leave nothing else: far
below every other logit, yet a number."""

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


class Drawing:
    """What is drawn on a device, and what the host learns of it when it is there."""

    def __init__(self, tokens: Tensor, best: Tensor, likeliest: Sequence[Tensor], asked: list[int],
                 counts: list[int], stuck: set[int]) -> None:  # fmt: skip
        self.tokens = tokens
        """int64 `[rows]`. Where logits are not numbers, any."""
        self._landing = Landing(tokens, best, *likeliest)
        self._asked, self._counts, self._stuck = asked, counts, stuck

    def result(self) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Tokens and log-probabilities, one a row; waits for them, in any thread. ValueError where logits are
        not numbers."""
        tokens, best, *likeliest = self._landing.wait()
        if not np.isfinite(best).all():
            _refuse(best)
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self._asked:
            for row, found in zip(self._asked, _told(likeliest, self._counts), strict=True):
                logprobs[row] = found
        return [None if row in self._stuck else token for row, token in enumerate(tokens)], logprobs


def draw(
    logits: Tensor, chunks: Sequence[Chunk], *, kernels: bool = False
) -> tuple[list[int | None], list[TokenLogprobs | None]]:
    """The result of `launch`, at once."""
    return launch(logits, chunks, kernels=kernels).result()


def launch(logits: Tensor, chunks: Sequence[Chunk], *, kernels: bool = False) -> Drawing:
    """Tokens and log-probabilities, one a row; `logits` is float32 `[rows, vocabulary]` and may be changed.

    Order: log-probabilities of the raw logits, then bias, minimum length, penalties, constraint,
    temperature, top-k, top-p among what is left (Holtzman et al., 2020), min-p, noise. The token is None
    where a constraint allows none. Raises ValueError on logits that are not numbers, here or with the result,
    rather than drawing a wrong token. `kernels`: by Triton, whose tokens are the same, without a wait for the
    device but where a row is constrained or penalised.
    """
    asked = [row for row, chunk in enumerate(chunks) if chunk.sampling.logprobs >= 0]
    if asked:
        (rows,) = staging_of(logits.device).upload(np.asarray(asked))
        raw = torch.log_softmax(logits[rows], dim=-1)
    _adjust(logits, chunks)
    stuck = _constrain(logits, chunks)
    tokens, best = _by_kernels(logits, chunks) if kernels else _by_torch(logits, chunks)
    counts = [chunks[row].sampling.logprobs for row in asked]
    likeliest = _likeliest(raw, tokens[rows], counts) if asked else ()
    return Drawing(tokens, best, likeliest, asked, counts, stuck)


def _by_torch(logits: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    best, tokens = _highest(logits)
    if not bool(torch.isfinite(best).all()):
        _refuse(best.tolist())
    random = [row for row, chunk in enumerate(chunks) if chunk.sampling.temperature >= _COLDEST]
    if random:
        _draw_random(logits, best, tokens, random, chunks)
    return tokens, best


def _by_kernels(logits: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    from engine.kernels import draw  # Triton is there where this was asked for

    return draw.draw(logits, chunks)


def _refuse(best: Sequence[float]) -> None:
    bad = [row for row, value in enumerate(best) if not np.isfinite(value)]
    raise ValueError(f"the model gave logits that are not finite numbers, in rows {bad} of a step")


def _kernels(logits: Tensor) -> CDLL | None:
    if logits.device.type != "cpu" or not logits.is_contiguous():
        return None
    try:
        return native(logits.dtype).library
    except Unusable:
        return None


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, and its first place."""
    kernels = _kernels(logits)
    if kernels is None:
        found = logits.max(dim=-1)
        return found.values, found.indices
    best, places = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    kernels.highest(logits.data_ptr(), *logits.shape, best.data_ptr(), places.data_ptr())
    return best, places


def score(logits: Tensor, wanted: Sequence[tuple[int, int]]) -> list[TokenLogprobs]:
    """Of known tokens: a row of `logits` for each (token, how many of the most likely ones beside it)."""
    counts = [count for _, count in wanted]
    tokens = torch.tensor([token for token, _ in wanted], device=logits.device)
    likeliest = _likeliest(torch.log_softmax(logits, dim=-1), tokens, counts)
    return _told([found.tolist() for found in likeliest], counts)


def _adjust(logits: Tensor, chunks: Sequence[Chunk]) -> None:
    """Bias, minimum length and penalties, for the rows that have any. Of tokens that the model has not, as
    some tokenizers do, a bias means nothing."""
    rows: list[int] = []
    columns: list[int] = []
    added: list[float] = []
    for row, chunk in enumerate(chunks):
        sampling = chunk.sampling
        for token, bias in sampling.logit_bias:
            rows.append(row)
            columns.append(token)
            added.append(bias)
        made = chunk.start + len(chunk.tokens) - chunk.prompt_length
        early = sampling.stop_token_ids if sampling.min_tokens > made else ()
        least = -np.inf
        if chunk.matcher is not None:
            least = _LAST
            if early or sampling.ignore_eos:
                # Its end cannot be ignored, as nothing may follow it; but it can be put off.
                early = tuple({*early, *chunk.matcher.end_tokens})
        for token in early:
            rows.append(row)
            columns.append(token)
            added.append(least)
    if columns and not 0 <= min(columns) <= max(columns) < logits.shape[1]:
        known = [place for place, token in enumerate(columns) if 0 <= token < logits.shape[1]]
        rows, columns = [rows[place] for place in known], [columns[place] for place in known]
        added = [added[place] for place in known]
    if rows:
        at, of, more = staging_of(logits.device).upload(
            np.asarray(rows), np.asarray(columns), np.asarray(added, dtype=np.float32)
        )
        logits.index_put_((at, of), more, accumulate=True)
    for row, chunk in enumerate(chunks):
        if chunk.history:
            _penalise(logits[row], chunk)


def _constrain(logits: Tensor, chunks: Sequence[Chunk]) -> set[int]:
    """Tokens that a row's constraint forbids get -inf. Returns the rows where it forbids all: they keep
    their logits."""
    rows = [row for row, chunk in enumerate(chunks) if chunk.matcher is not None]
    if not rows:
        return set()
    vocabulary = logits.shape[1]
    masks = np.zeros((len(rows), -(-vocabulary // 32)), dtype="<i4")
    for place, row in enumerate(rows):
        matcher = chunks[row].matcher
        assert matcher is not None
        if matcher.vocabulary > vocabulary:
            raise ValueError(f"a constraint on {matcher.vocabulary} tokens; the model has {vocabulary}")
        matcher.fill(masks, place)
    stuck = {row for place, row in enumerate(rows) if not masks[place].any()}
    packed = torch.from_numpy(masks.view(np.uint8)).to(logits.device)
    allowed = (packed.unsqueeze(-1) & _BITS.to(logits.device)).view(len(rows), -1)[:, :vocabulary]
    for place, row in enumerate(rows):
        if row not in stuck:
            logits[row].masked_fill_(allowed[place] == 0, -torch.inf)
    return stuck


def _penalise(logits: Tensor, chunk: Chunk) -> None:
    """Repetition (Keskar et al., 2019) over all tokens; presence and frequency over the generated ones."""
    sampling = chunk.sampling
    history = np.asarray(chunk.history, dtype=np.int64)
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(history)).to(logits.device)
        values, factor = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        made, counts = np.unique(history[chunk.prompt_length :], return_counts=True)
        less = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[torch.from_numpy(made).to(logits.device)] -= torch.from_numpy(less).to(logits)


def _draw_random(
    logits: Tensor, best: Tensor, tokens: Tensor, random: list[int], chunks: Sequence[Chunk]
) -> None:
    """Puts drawn tokens in place of the most likely ones, for the rows `random`."""
    device, vocabulary = logits.device, logits.shape[1]
    cut = [row for row in random if _cuts(chunks[row], vocabulary)]
    whole = [row for row in random if not _cuts(chunks[row], vocabulary)]
    kernels = _kernels(logits) if whole else None
    if kernels is not None:
        # Makes noise only for tokens that could win with it, of which there are few.
        part = [chunks[row] for row in whole]
        keys = noise.keys([_place(chunk) for chunk in part], device).tolist()
        for row, chunk, (key, other) in zip(whole, part, keys, strict=True):
            sampling = chunk.sampling
            least = math.log(sampling.min_p) if sampling.min_p else -math.inf
            start = logits.data_ptr() + row * vocabulary * 4
            tokens[row] = kernels.draw(
                start, vocabulary, float(best[row]), sampling.temperature, least, key, other
            )
    elif whole:
        every = torch.arange(vocabulary, dtype=torch.int32, device=device)
        # A few rows at a time on a CPU: noise for all of them would not stay in its cache.
        count = max(1, _CACHED // vocabulary) if device.type == "cpu" else len(whole)
        for first in range(0, len(whole), count):
            rows = whole[first : first + count]
            part = [chunks[row] for row in rows]
            tokens[rows] = _winner(_scaled(logits, best, rows, part), every, part)
    if cut:
        part = [chunks[row] for row in cut]
        limits = [(chunk.sampling.top_k, chunk.sampling.top_p) for chunk in part]
        values, candidates = _likely(_scaled(logits, best, cut, part), limits)
        place = _winner(values, candidates.int(), part)
        tokens[cut] = candidates.gather(1, place.unsqueeze(1)).squeeze(1)


def _scaled(logits: Tensor, best: Tensor, rows: list[int], chunks: Sequence[Chunk]) -> Tensor:
    """Logits over temperature, with the largest of each row at 0."""
    heat = torch.tensor([chunk.sampling.temperature for chunk in chunks], device=logits.device)
    return (logits[rows] - best[rows].unsqueeze(1)).div_(heat.unsqueeze(1))


def _cuts(chunk: Chunk, vocabulary: int) -> bool:
    return 0 < chunk.sampling.top_k < vocabulary or chunk.sampling.top_p < 1.0


def _place(chunk: Chunk) -> tuple[int, int]:
    """Seed, and the position of the token that is drawn: the same wherever the sequence runs."""
    return chunk.sampling.seed, chunk.start + len(chunk.tokens)


def _winner(scaled: Tensor, candidates: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Column of the largest logit plus noise in each row; `scaled` has its maximum at 0."""
    if any(chunk.sampling.min_p for chunk in chunks):
        least = torch.tensor([chunk.sampling.min_p for chunk in chunks], device=scaled.device)
        least = least.log().unsqueeze(1)
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    draws = [_place(chunk) for chunk in chunks]
    return (noise.gumbel(noise.keys(draws, scaled.device), candidates) + scaled).argmax(dim=-1)


def _likely(scaled: Tensor, limits: Sequence[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    """The tokens that top-k and top-p leave: (scaled logits with -inf for cut ones, token ids).

    A cut is a value, and all tokens of that value stay: what is left must not depend on how a sort orders
    equal logits. So the list grows until every row's cut lies inside it.
    """
    vocabulary = scaled.shape[1]
    device = scaled.device
    ks = torch.tensor([k if 0 < k < vocabulary else vocabulary for k, _ in limits], device=device).unsqueeze(
        1
    )
    ps = torch.tensor([p for _, p in limits], device=device).unsqueeze(1)
    every = scaled.exp().sum(dim=-1, keepdim=True)
    size = min(max([_LIST, *(k + 1 for k, _ in limits)]), vocabulary)
    while True:
        values, candidates = scaled.topk(size, dim=-1)
        weights = values.exp()
        rank = torch.arange(size, device=device)
        kept = rank < ks
        total = torch.where(ks < vocabulary, (weights * kept).sum(dim=-1, keepdim=True), every)
        # A token stays while those before it have not yet reached top_p; the first one always does.
        kept &= ((weights.cumsum(dim=-1) - weights) < ps * total) | (rank == 0)
        least = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
        if size == vocabulary or bool((values[:, -1:] < least).all()):
            return values.masked_fill(values < least, -torch.inf), candidates
        size = min(size * 8, vocabulary)


def _likeliest(raw: Tensor, tokens: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of log-probabilities: those of `tokens`, the highest of each row, and whose they are."""
    highest = raw.topk(min(max(counts), raw.shape[1]), dim=-1)
    return raw.gather(1, tokens.unsqueeze(1)).squeeze(1), highest.values, highest.indices


def _told(likeliest: Sequence[list[Any]], counts: list[int]) -> list[TokenLogprobs]:
    own, values, tokens = likeliest
    return [
        TokenLogprobs(own[i], tuple(zip(tokens[i][:count], values[i][:count], strict=True)))
        for i, count in enumerate(counts)
    ]
