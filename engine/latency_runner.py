"""A runner without weights: a tiny exact model whose KV lies in the real pool, and a model of its time.

For virtual time, for load tests, and for tests of all that moves KV about: the KV of a token is a mix of
the KV before it, read through the block table, and the token; what is drawn depends on the KV of the last
token and of a few earlier ones. KV that is stale, torn or another sequence's shows as another text, and a
sequence goes on the same on every worker that holds its KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.words import Batch, BatchResult, Chunk, Matcher
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.request import Sampling, TokenLogprobs

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_FACTOR = 0xD1342543DE82EF95
_PROBES = 2
"""Earlier tokens whose KV a draw depends on, so that a block lost far back is noticed too."""


def _mix(a: int, b: int) -> int:
    """64 bits of two numbers (the finalizer of SplitMix64)."""
    z = (a ^ (b + 1) * _FACTOR) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _next_kv(last: int, token: int) -> int:
    """KV of a token after a context with the KV `last`: a polynomial hash of 64 bits. Whatever is drawn goes
    through `_mix`."""
    return (last * _FACTOR + token + 1) & _MASK


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Seconds a step takes: `base_s`, and more for each part of the work."""

    base_s: float = 0.0
    per_prompt_token_s: float = 0.0
    """For each token of a chunk of more than one."""
    per_decode_s: float = 0.0
    """For each chunk of one token."""
    per_context_token_s: float = 0.0
    """For each token whose KV is read: of each chunk, the tokens before its end."""

    def step_s(self, batch: Batch) -> float:
        seconds = self.base_s
        for chunk in batch.chunks:
            count = len(chunk.tokens)
            seconds += self.per_decode_s if count == 1 else count * self.per_prompt_token_s
            seconds += (chunk.start + count) * self.per_context_token_s
        return seconds


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Which tokens it draws. Two runners with equal models continue each other's sequences."""

    name: str = "toy"
    first_token: int = 32
    tokens: int = 95
    """Draws from `first_token` and the tokens after it."""
    end_token: int | None = None
    end_rate: float = 0.0
    """How often the end token is drawn, after `min_tokens`; 0.01 ends an answer after 100 on average."""

    def draw(self, seen: Sequence[int], position: int, sampling: Sampling, drawn_before: int) -> int:
        """The token at `position`. `seen`: KV of the last token, then of the probed ones."""
        state = sampling.seed if sampling.temperature > 0 else 0
        for value in seen:
            state = state * _FACTOR + value & _MASK
        state = _mix(position, state)
        may_end = drawn_before >= sampling.min_tokens and (state >> 32) < self.end_rate * (1 << 32)
        if may_end and self.end_token is not None:
            return self.end_token
        return self.first_token + state % self.tokens


@lru_cache(maxsize=1 << 14)
def probes(position: int) -> tuple[int, ...]:
    """Earlier positions that the draw at `position` looks at."""
    return tuple(_mix(position, probe) % position for probe in range(_PROBES))


def reference_tokens(
    prompt: Sequence[int],
    sampling: Sampling,
    count: int | None = None,
    model: ToyModel | None = None,
    matcher: Matcher | None = None,
) -> list[int]:
    """What every sequence must become: up to `count` tokens (or `max_tokens`), stop token included; under the
    constraint of `matcher`, a fresh one."""
    model = model or ToyModel()
    kv: list[int] = []
    last = _START
    for token in prompt:
        last = _next_kv(last, token)
        kv.append(last)
    drawn: list[int] = []
    while len(drawn) < (sampling.max_tokens if count is None else count):
        position = len(kv)
        seen = [last, *(kv[probe] for probe in probes(position))]
        token = model.draw(seen, position, sampling, len(drawn))
        if matcher is not None:
            allowed = nearest(matcher, token, sampling, len(drawn))
            if allowed is None or not matcher.accept(allowed):
                raise ValueError(f"after {len(drawn)} tokens the constraint leaves none")
            token = allowed
        drawn.append(token)
        if matcher is not None and matcher.finished:
            break
        if token in sampling.stop_token_ids and len(drawn) > sampling.min_tokens:
            break
        last = _next_kv(last, token)
        kv.append(last)
    return drawn


def nearest(matcher: Matcher, token: int, sampling: Sampling, drawn_before: int) -> int | None:
    """The first token at or after the one drawn that the constraint allows, past the last one from the
    start; an end token that is not wanted yet only where nothing else is allowed. None: none is."""
    mask = np.zeros((1, -(-matcher.vocabulary // 32)), dtype="<i4")
    matcher.fill(mask, 0)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
    if sampling.ignore_eos or drawn_before < sampling.min_tokens:
        others = np.setdiff1d(allowed, (*matcher.end_tokens, *sampling.stop_token_ids))
        allowed = others if len(others) else allowed
    if not len(allowed):
        return None
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


@dataclass(slots=True)
class LatencyRunner:
    """A `Runner`. `memory`: uint8 `[blocks, block_bytes]`, contiguous; a transfer layer's region, or own."""

    memory: NDArray[np.uint8]
    layout: KvLayout
    latency: LatencyModel = field(default_factory=LatencyModel)
    model: ToyModel = field(default_factory=ToyModel)
    max_tokens: int = 1 << 20
    tokenizer: str = "toy"
    """Digest of the tokenizer that the fleet's other workers name, if any."""
    _words: NDArray[np.uint32] = field(init=False, repr=False)
    """`[blocks, 2, block_size]`."""
    _flat: memoryview[int] = field(init=False, repr=False)
    """The same, one after another: single words are read and written in a tenth of the time."""
    _drawn: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """By slot, what was drawn last."""
    _turn: asyncio.Lock = field(init=False, repr=False, default_factory=asyncio.Lock)

    _size: int = field(init=False, repr=False)
    """Of a block, tokens."""

    def __post_init__(self) -> None:
        self._size = self.layout.block_size
        if self.layout != self.layout_of(self.layout.block_size):
            raise ValueError(f"the latency runner's layout is {self.layout_of(self.layout.block_size)}")
        if self.memory.dtype != np.uint8 or self.memory.shape[1:] != (self.layout.block_bytes,):
            raise ValueError(f"memory must be uint8 [blocks, {self.layout.block_bytes}]")
        if not self.memory.flags.c_contiguous:
            raise ValueError("memory must be contiguous")
        self._words = self.memory.view(np.uint32).reshape(self.blocks, 2, self.layout.block_size)
        self._flat = self._words.reshape(-1).data

    @staticmethod
    def layout_of(block_size: int) -> KvLayout:
        """8 bytes a token: the low half of its KV as K, the high half as V."""
        return KvLayout(layers=1, kv_heads=1, head_dim=4, block_size=block_size, dtype="uint8")

    @classmethod
    def with_own_memory(
        cls,
        blocks: int,
        block_size: int,
        latency: LatencyModel | None = None,
        model: ToyModel | None = None,
        max_tokens: int = 1 << 20,
    ) -> LatencyRunner:
        layout = cls.layout_of(block_size)
        memory = np.zeros((blocks, layout.block_bytes), dtype=np.uint8)
        return cls(memory, layout, latency or LatencyModel(), model or ToyModel(), max_tokens)

    @property
    def blocks(self) -> int:
        return int(self.memory.shape[0])

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.layout, model=self.model.name, tokenizer=self.tokenizer)

    async def run(self, batch: Batch) -> BatchResult:
        """Reads and writes KV at the end of its time, so that a block given away too early is noticed."""
        async with self._turn:
            await asyncio.sleep(self.latency.step_s(batch))
            return self._step(batch)

    def _step(self, batch: Batch) -> BatchResult:
        tokens = tuple(self._compute(chunk) for chunk in batch.chunks)
        scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
        if any(chunk.targets for chunk in batch.chunks):
            scores = tuple(self._scores(chunk) for chunk in batch.chunks)
        if all(chunk.sampling.logprobs < 0 for chunk in batch.chunks):
            return BatchResult(tokens, scores=scores)
        pairs = zip(batch.chunks, tokens, strict=True)
        return BatchResult(tokens, tuple(self._logprobs(chunk, token) for chunk, token in pairs), scores)

    @property
    def asynchronous(self) -> bool:
        return False

    @property
    def staged(self) -> bool:
        return False

    async def to_host(self, blocks: Sequence[int]) -> None:
        """The pool is the memory that was given."""

    async def from_host(self, blocks: Sequence[int]) -> None:
        """The pool is the memory that was given."""

    async def close(self) -> None:
        """Nothing to close."""

    def _compute(self, chunk: Chunk) -> int | None:
        start, end, read = chunk.start, chunk.start + len(chunk.tokens), self._read
        last = read(chunk, start - 1) if start else _START
        values: list[int] = []
        for token in (self._drawn.get(chunk.slot, 0),) if chunk.carried else chunk.tokens:
            last = last * _FACTOR + token + 1 & _MASK  # `_next_kv`: a call would cost twice as much.
            values.append(last)
        self._write(chunk, values)
        if not chunk.draw:
            return None
        seen = [last, *[read(chunk, probe) for probe in probes(end)]]
        drawn_before = end - chunk.prompt_length
        token = self.model.draw(seen, end, chunk.sampling, drawn_before)
        if chunk.matcher is None:
            self._drawn[chunk.slot] = token
            return token
        return nearest(chunk.matcher, token, chunk.sampling, drawn_before)

    def _read(self, chunk: Chunk, position: int) -> int:
        flat, size = self._flat, self._size
        place = chunk.blocks[position // size] * 2 * size + position % size
        return flat[place] | flat[place + size] << 32

    def _write(self, chunk: Chunk, values: list[int]) -> None:
        size = self._size
        if len(values) == 1:
            flat, value, start = self._flat, values[0], chunk.start
            place = chunk.blocks[start // size] * 2 * size + start % size
            flat[place], flat[place + size] = value & 0xFFFFFFFF, value >> 32
            return
        blocks, offsets = np.divmod(np.arange(chunk.start, chunk.start + len(values)), size)
        halves = np.array(values, dtype="<u8").view("<u4").reshape(-1, 2)
        self._words[np.asarray(chunk.blocks)[blocks], :, offsets] = halves

    def _scores(self, chunk: Chunk) -> tuple[TokenLogprobs, ...]:
        """Made up of the KV before each token, so that wrong KV shows."""
        kv = (self._read(chunk, chunk.start + k) for k in range(len(chunk.targets)))
        return tuple(TokenLogprobs(-(1 + value % 1000) / 100) for value in kv)

    def _logprobs(self, chunk: Chunk, token: int | None) -> TokenLogprobs | None:
        """Made up, but well formed: the drawn token is the likeliest, each further half as likely."""
        wanted = chunk.sampling.logprobs
        if wanted < 0 or token is None:
            return None
        others = (self.model.first_token + (token + i) % self.model.tokens for i in range(1, wanted + 1))
        top = [token, *(other for other in others if other != token)][:wanted]
        return TokenLogprobs(-0.6931, tuple((t, -0.6931 * (rank + 1)) for rank, t in enumerate(top)))
