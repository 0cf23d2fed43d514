"""The choice of a worker: expected seconds, and why. Pure.

A prompt costs the tokens queued before it and its own uncached ones, at the worker's measured speed;
a hand-off costs the blocks that the decode worker lacks, at its measured bandwidth; decoding costs the
steps of a crowded batch, and a wait where memory is short. A decode worker may compute a short prompt
itself. Among near equals, two are drawn by the request's own number and the less loaded is taken
(Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001), so that idle equals share
and routers with the same picture do not all run to the same worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet.ids import Incarnation, WorkerId
from fleet.member import Role
from router.roster import Pool, Standing
from router.settings import CostSettings


@dataclass(frozen=True, slots=True)
class Choice:
    """Where the next leg of a request goes."""

    worker: WorkerId
    incarnation: Incarnation
    seconds: float
    """Expected: of a prompt, until it is handed off and the first tokens come; of a decode, until then."""
    local: bool
    """A decode worker computes the prompt itself."""
    tokens: int
    """Prompt tokens it has to compute."""
    blocks: int
    """KV blocks it has to find room for."""
    why: str


@dataclass(frozen=True, slots=True)
class Ask:
    """What a choice is about."""

    tokens: int
    """Tokens whose KV is needed: the prompt, and what was generated so far."""
    matched: Mapping[WorkerId, int]
    """Leading blocks each worker caches; absent: none."""
    tie: int
    """Even over requests, the same for one request: a hash of its id."""
    avoid: Collection[Incarnation] = ()
    """Lives of workers that refused or lost this request."""
    routers: int = 1
    """Routers that choose at the same time, this one included."""


@dataclass(slots=True)
class _Offer:
    worker: Standing
    seconds: float
    work_s: float
    """Of it, what this request itself adds."""
    cached: int
    tokens: int
    """To compute there."""
    local: bool = False
    transfer_s: float = 0.0


def choose_prefill(pool: Pool, ask: Ask, settings: CostSettings) -> Choice | None:
    """A prefill worker, or a decode worker that computes the prompt itself; None: nobody is left."""
    size = pool.block_size
    decode = [_decode_offer(pool, worker, ask, settings, True) for worker in _able(pool.decode, ask)]
    if not decode:
        return None
    after = min(offer.seconds for offer in decode) + settings.handoff_s
    remote: list[_Offer] = []
    for worker in _able(pool.prefill, ask):
        cached = ask.matched.get(worker.id, 0)
        tokens = max(1, ask.tokens - cached * size)
        work = tokens / worker.prefill_tokens_s
        waits = worker.queued_tokens / worker.prefill_tokens_s
        remote.append(_Offer(worker, waits + work + after, work, cached, tokens))
    local = [_decode_offer(pool, offer.worker, ask, settings, False) for offer in decode]
    if not remote:
        return _take(pool, ask, settings, local, len(local), "no prefill worker")
    best = min(offer.seconds for offer in remote)
    short = settings.local_prefill_tokens
    near = [
        offer
        for offer in local
        if offer.seconds * (1.0 if offer.tokens <= short else settings.local_advantage) < best
    ]
    return _take(pool, ask, settings, near or remote, len(remote) + len(local), "")


def choose_decode(pool: Pool, ask: Ask, settings: CostSettings, *, ticket: bool) -> Choice | None:
    """A decode worker; with a ticket it pulls the KV it lacks, else it computes it. None: nobody is left."""
    offers = [_decode_offer(pool, worker, ask, settings, ticket) for worker in _able(pool.decode, ask)]
    return _take(pool, ask, settings, offers, len(offers), "") if offers else None


def _able(workers: Sequence[Standing], ask: Ask) -> list[Standing]:
    """Those that could hold the sequence and one token more, and did not fail it before."""
    return [w for w in workers if w.card.max_tokens > ask.tokens and w.card.incarnation not in ask.avoid]


def _decode_offer(pool: Pool, worker: Standing, ask: Ask, settings: CostSettings, ticket: bool) -> _Offer:
    cached = ask.matched.get(worker.id, 0)
    needed = -(-ask.tokens // pool.block_size) + 1 - cached
    crowd = worker.sequences + 1 - worker.decode_batch
    pace = worker.decode_step_s * (1 + settings.crowding * crowd if crowd > 0 else 1)
    seconds = settings.horizon_tokens * pace + worker.waiting * worker.decode_step_s
    work = settings.horizon_tokens * worker.decode_step_s * settings.crowding
    if worker.blocks_free < needed:
        seconds += settings.memory_s * (1 - worker.blocks_free / needed)
    waits = worker.queued_tokens / worker.prefill_tokens_s
    if ticket:
        transfer = (needed - 1) * pool.block_bytes / worker.pull_bytes_s
        return _Offer(worker, seconds + waits + transfer, work + transfer, cached, 0, transfer_s=transfer)
    tokens = max(1, ask.tokens - cached * pool.block_size)
    compute = tokens / worker.prefill_tokens_s * (1 + settings.disturbance * worker.sequences)
    return _Offer(worker, seconds + waits + compute, work + compute, cached, tokens, local=True)


def _take(pool: Pool, ask: Ask, settings: CostSettings, offers: list[_Offer], seen: int, note: str) -> Choice:
    best = min(offers, key=lambda offer: offer.seconds)
    herd = settings.herd_share * (ask.routers - 1)
    limit = best.seconds + settings.tie_s + best.work_s * (settings.tie_share + herd)
    near = [offer for offer in offers if offer.seconds <= limit]
    chosen = best
    if len(near) > 1:
        first = ask.tie % len(near)
        second = (first + 1 + ask.tie // len(near) % (len(near) - 1)) % len(near)
        one, other = near[first], near[second]
        chosen = other if _busy(other) < _busy(one) else one
    worker, blocks = chosen.worker, -(-ask.tokens // pool.block_size)
    told = worker.report is not None
    parts = [
        f"{worker.queued_tokens:.0f} queued tokens" if told else "load unknown",
        f"{chosen.cached}/{blocks} blocks cached",
    ]
    if chosen.local:
        parts.append(f"computes {chosen.tokens} tokens itself")
    if worker.card.role is Role.DECODE:
        parts.append(f"{worker.sequences:.0f} sequences")
    if chosen.transfer_s:
        parts.append(f"transfer {chosen.transfer_s * 1000:.1f} ms")
    if worker.blocks_free < blocks - chosen.cached:
        parts.append(f"only {worker.blocks_free:.0f} blocks free")
    if note:
        parts.append(note)
    parts.append(f"{len(near)} of {seen} near {best.seconds * 1000:.0f} ms")
    return Choice(
        worker=worker.id,
        incarnation=worker.card.incarnation,
        seconds=chosen.seconds,
        local=chosen.local,
        tokens=chosen.tokens,
        blocks=max(0, blocks + 1 - chosen.cached),
        why=", ".join(parts),
    )


def _busy(offer: _Offer) -> tuple[float, float]:
    return (offer.worker.sequences, offer.worker.queued_tokens)
