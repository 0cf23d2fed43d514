"""The choice of a worker: expected seconds, and why. Pure.

A prompt costs the tokens queued before it and its own uncached ones, at the worker's measured speed, or the
bytes of those that another worker caches, at its measured bandwidth, where bringing them is clearly sooner;
a hand-off costs the blocks that the decode worker lacks, at its measured bandwidth; decoding costs the
steps of a crowded batch, and a wait where memory is short. A decode worker may compute a short prompt
itself. Among near equals, two are drawn by the request's own number and the less loaded is taken
(Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001), so that idle equals share
and routers with the same picture do not all run to the same worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from msgspec import Struct

from fleet.handoff import Holder
from fleet.ids import Incarnation, WorkerId
from fleet.member import Role
from router.roster import Pool, Standing
from router.settings import CostSettings


class Candidate(NamedTuple):
    """A worker as it stood when one was chosen; four parts make up the seconds. A tuple: cheap to make."""

    worker: WorkerId
    role: Role
    seconds: float
    """Expected, as in `Choice`."""
    queue_s: float
    """For the prompts before it there."""
    compute_s: float
    """For its own prompt, as far as that is not cached."""
    transfer_s: float
    """For the KV to come."""
    decode_s: float
    """For the first tokens after that, and a wait where memory is short; of a prefill worker, with the
    hand-off to the decode worker that is best for it."""
    queued_tokens: float
    sequences: float
    blocks_free: float
    cached: int
    """Blocks of the prompt that are there."""
    tokens: int
    """To compute there."""
    borrowed: int
    """Blocks that it would bring from another worker before that."""

    def as_dict(self) -> dict[str, Any]:
        return {name: round(v, 6) if isinstance(v, float) else v for name, v in self._asdict().items()}


class Considered(Struct, frozen=True):
    """What a choice was made from."""

    best: tuple[Candidate, ...]
    """Some that were expected to be soonest, in that order, and the one that was taken."""
    others: int
    """How many more there were."""
    near: int
    """How many were as good as the soonest, so that the less loaded of two of them was taken."""
    near_s: float
    """Up to how many expected seconds that was."""
    left_out: int
    """Workers that had refused or lost this request, or are too small for it."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "best": [candidate.as_dict() for candidate in self.best],
            "others": self.others,
            "near": self.near,
            "near_s": round(self.near_s, 6),
            "left_out": self.left_out,
        }


class Choice(Struct, frozen=True):
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
    considered: Considered
    holder: Holder | None = None
    """From whom it is to bring the beginning that it does not cache."""
    borrow_s: float = 0.0
    """Seconds expected for that."""


class Ask(Struct, frozen=True):
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
    lost: Collection[Incarnation] = ()
    """Of `avoid`, those that cannot be asked for KV either."""
    prefer: Collection[WorkerId] = ()
    """Taken among near equals: the last turn of the conversation went there."""
    only: Collection[WorkerId] = ()
    """Of the roles that these have, no others are taken."""


_Base = tuple[float, float, Standing, int, int]
_Offer = tuple[float, float, Standing, int, int, bool, float, int]
"""Expected seconds; of them, what this request itself adds; worker; its cached blocks; tokens to compute
there; whether a decode worker computes the prompt; seconds of transfer; blocks that are borrowed. A plain
tuple: hundreds are made for one choice."""
_Lender = tuple[Standing | None, int]
"""Who caches most of the sequence, and how many blocks of use that is: the last token is computed anyway."""
_seconds = itemgetter(0)
_SHOWN = 8
"""Candidates kept of each choice, for explaining."""


def choose_prefill(pool: Pool, ask: Ask, settings: CostSettings) -> Choice | None:
    """A prefill worker, or a decode worker that computes the prompt itself; None: nobody is left."""
    bases = _decode_bases(pool, ask, settings)
    if not bases:
        return None
    lender = _lender(pool, ask, settings)
    remote = _remote(pool, ask, settings, bases, lender)
    if not remote:
        local = _local(pool, ask, settings, bases, lender)
        return _take(pool, ask, settings, local, [], len(bases), "no prefill worker", lender)
    best = min(map(_seconds, remote))
    short, advantage = settings.local_prefill_tokens, settings.local_advantage
    # Most decode workers would be too late even if they had the prompt computed for nothing.
    enough = (ask.tokens - short) / pool.block_size
    anyone = lender[1] >= enough
    hopeful = [base for base in bases if base[0] * (1.0 if anyone or base[3] >= enough else advantage) < best]
    local = _local(pool, ask, settings, hopeful, lender)
    near = [offer for offer in local if offer[0] * (1.0 if offer[4] <= short else advantage) < best]
    if ask.only and any(offer[2].card.id in ask.only for offer in remote):
        near = []
    seen = len(remote) + len(bases)
    return _take(pool, ask, settings, near or remote, remote if near else local, seen, "", lender)


def choose_decode(pool: Pool, ask: Ask, settings: CostSettings, *, ticket: bool) -> Choice | None:
    """A decode worker; with a ticket it pulls the KV it lacks, else it computes it. None: nobody is left."""
    bases = _decode_bases(pool, ask, settings)
    if not bases:
        return None
    lender = _NOBODY if ticket else _lender(pool, ask, settings)
    offers = _with_ticket(pool, bases) if ticket else _local(pool, ask, settings, bases, lender)
    return _take(pool, ask, settings, offers, [], len(offers), "", lender, among=len(pool.decode))


def _able(workers: Sequence[Standing], ask: Ask) -> list[Standing]:
    """Those that could hold the sequence and one token more, and did not fail it before."""
    tokens, avoid = ask.tokens, ask.avoid
    if ask.only:
        workers = [w for w in workers if w.card.id in ask.only] or workers
    if not avoid:
        return [w for w in workers if w.card.max_tokens > tokens]
    return [w for w in workers if w.card.max_tokens > tokens and w.card.incarnation not in avoid]


def _weigh(worker: Standing, settings: CostSettings) -> tuple[CostSettings, float, float, float, float]:
    """What does not depend on the request, kept until the worker's figures change: seconds until the first
    tokens of one more have come there, and of them what it adds; seconds for the prompts queued; and for
    each token of a prompt beside its streams."""
    step, speed = worker.decode_step_s, worker.prefill_tokens_s
    crowd, queue_s = worker.sequences + 1 - worker.decode_batch, worker.queued_tokens / speed
    crowding, first = settings.crowding, settings.horizon_tokens * step
    seconds = first * (1 + crowding * crowd if crowd > 0 else 1) + worker.waiting * step + queue_s
    each = (1 + settings.disturbance * worker.sequences) / speed
    worker.weighed = weighed = (settings, seconds, first * crowding, queue_s, each)
    return weighed


def _decode_bases(pool: Pool, ask: Ask, settings: CostSettings) -> list[_Base]:
    """Of each decode worker, with the KV there: seconds until the first tokens have come and what this
    request adds to them, its cached blocks, and the prompt's blocks that it lacks."""
    blocks, cached_at = -(-ask.tokens // pool.block_size), ask.matched.get
    bases = []
    for worker in _able(pool.decode, ask):
        weighed = worker.weighed
        if weighed is None or weighed[0] is not settings:
            weighed = _weigh(worker, settings)
        _, seconds, work, _, _ = weighed
        cached = cached_at(worker.card.id, 0)
        lacks = blocks - cached
        if worker.blocks_free <= lacks:
            seconds += settings.memory_s * (1 - worker.blocks_free / (lacks + 1))
        bases.append((seconds, work, worker, cached, lacks))
    return bases


def _with_ticket(pool: Pool, bases: list[_Base]) -> list[_Offer]:
    size = pool.block_bytes
    offers: list[_Offer] = []
    for seconds, work, worker, cached, lacks in bases:
        transfer = lacks * size / worker.pull_bytes_s
        offers.append((seconds + transfer, work + transfer, worker, cached, 0, False, transfer, 0))
    return offers


_NOBODY: _Lender = (None, 0)


def _lender(pool: Pool, ask: Ask, settings: CostSettings) -> _Lender:
    """Of several with as much, one drawn by the request's own number."""
    deepest = max(ask.matched.values(), default=0)
    if not deepest or not settings.borrow_advantage:
        return _NOBODY
    everybody, matched, lost = (*pool.prefill, *pool.decode), ask.matched.get, ask.lost
    most = _who_has(deepest, everybody, ask)
    if not most:
        able = [w for w in everybody if w.report is not None and w.card.incarnation not in lost]
        deepest = max([matched(worker.card.id, 0) for worker in able], default=0)
        most = _who_has(deepest, able, ask) if deepest else []
    if not most:
        return _NOBODY
    return most[ask.tie % len(most)], min(deepest, (ask.tokens - 1) // pool.block_size)


def _who_has(blocks: int, workers: Sequence[Standing], ask: Ask) -> list[Standing]:
    matched, lost = ask.matched.get, ask.lost
    return [
        worker
        for worker in workers
        if matched(worker.card.id) == blocks
        and worker.report is not None
        and worker.card.incarnation not in lost
    ]


def _borrowed(
    pool: Pool, settings: CostSettings, worker: Standing, more: int, compute_s: float
) -> tuple[float, int]:
    """Seconds to bring `more` blocks that take `compute_s` to compute, and how many; (0, 0) where that is
    not clearly sooner."""
    seconds = settings.borrow_s + more * pool.block_bytes / worker.pull_bytes_s
    return (seconds, more) if seconds * settings.borrow_advantage < compute_s else (0.0, 0)


def _local(pool: Pool, ask: Ask, settings: CostSettings, bases: list[_Base], lender: _Lender) -> list[_Offer]:
    size, needed, held = pool.block_size, ask.tokens, lender[1]
    offers: list[_Offer] = []
    for seconds, work, worker, cached, _ in bases:
        tokens = needed - cached * size or 1  # The last token is computed even where all is cached.
        each = (worker.weighed or _weigh(worker, settings))[4]
        transfer, come = 0.0, 0
        if held > cached:
            more = held - cached
            transfer, come = _borrowed(pool, settings, worker, more, more * size * each)
            tokens -= come * size
        own = tokens * each + transfer
        offers.append((seconds + own, work + own, worker, cached, tokens, True, transfer, come))
    return offers


def _remote(
    pool: Pool, ask: Ask, settings: CostSettings, bases: list[_Base], lender: _Lender
) -> list[_Offer]:
    """On prefill workers; whichever it is, the best decode worker follows."""
    size, per_block, needed, cached_at = pool.block_size, pool.block_bytes, ask.tokens, ask.matched.get
    held, borrow_s, advantage = lender[1], settings.borrow_s, settings.borrow_advantage
    after = settings.handoff_s + min(
        [seconds + lacks * per_block / worker.pull_bytes_s for seconds, _, worker, _, lacks in bases]
    )
    offers: list[_Offer] = []
    for worker in _able(pool.prefill, ask):
        weighed = worker.weighed
        if weighed is None or weighed[0] is not settings:
            weighed = _weigh(worker, settings)
        cached = cached_at(worker.card.id, 0)
        tokens = needed - cached * size or 1
        speed = worker.prefill_tokens_s
        transfer, come = 0.0, 0
        if held > cached:
            # As `_borrowed`, without a call: there may be hundreds.
            more = held - cached
            seconds = borrow_s + more * per_block / worker.pull_bytes_s
            if seconds * advantage < more * size / speed:
                transfer, come = seconds, more
                tokens -= more * size
        work = tokens / speed + transfer
        seconds = after + work + weighed[3]
        offers.append((seconds, work, worker, cached, tokens, False, transfer, come))
    return offers


def _take(
    pool: Pool,
    ask: Ask,
    settings: CostSettings,
    offers: list[_Offer],
    beaten: list[_Offer],
    seen: int,
    note: str,
    lender: _Lender,
    among: int | None = None,
) -> Choice:
    """One of `offers`; `beaten` are out, and only shown. `among` how many workers there are."""
    best = min(offers, key=_seconds)
    herd = settings.herd_share * (ask.routers - 1)
    limit = best[0] + settings.tie_s + best[1] * (settings.tie_share + herd)
    near = [offer for offer in offers if offer[0] <= limit]
    # Nothing is moved to where it would only be as good.
    near = [offer for offer in near if not offer[7]] or near
    chosen = near[0]
    if len(near) > 1:
        first = ask.tie % len(near)
        second = (first + 1 + ask.tie // len(near) % (len(near) - 1)) % len(near)
        chosen = min(near[first], near[second], key=_busy)
    kept = [offer for offer in near if offer[2].card.id in ask.prefer] if ask.prefer else []
    if kept:
        chosen = min(kept, key=_seconds)
    seconds, _, worker, cached, tokens, local, transfer, come = chosen
    blocks = -(-ask.tokens // pool.block_size)
    told = worker.report is not None
    parts = [
        f"{worker.queued_tokens:.0f} queued tokens" if told else "load unknown",
        f"{cached}/{blocks} blocks cached",
    ]
    if local:
        parts.append(f"computes {tokens} tokens itself")
    if worker.card.role is Role.DECODE:
        parts.append(f"{worker.sequences:.0f} sequences")
    holder = None
    if come:
        compute = come * pool.block_size / worker.prefill_tokens_s
        holder = _holder(
            pool, lender, compute * (1 + settings.disturbance * worker.sequences if local else 1)
        )
    if holder is not None:
        parts.append(f"borrows {come} blocks of {holder.worker} in {transfer * 1000:.1f} ms")
    elif transfer:
        parts.append(f"transfer {transfer * 1000:.1f} ms")
    if worker.blocks_free < blocks - cached:
        parts.append(f"only {worker.blocks_free:.0f} blocks free")
    if note:
        parts.append(note)
    if worker.card.id in ask.only:
        parts.append("pinned by the request")
    elif kept:
        parts.append("its session's last turn was here")
    parts.append(f"{len(near)} of {seen} near {best[0] * 1000:.0f} ms")
    return Choice(
        worker=worker.id,
        incarnation=worker.card.incarnation,
        seconds=seconds,
        local=local,
        tokens=tokens,
        blocks=max(0, blocks + 1 - cached),
        why=", ".join(parts),
        considered=_considered(pool, settings, offers + beaten, chosen, seen, len(near), limit, among),
        holder=holder,
        borrow_s=transfer if come else 0.0,
    )


def _holder(pool: Pool, lender: _Lender, compute_s: float) -> Holder | None:
    worker, blocks = lender
    if worker is None:
        return None
    card = worker.card
    return Holder(card.id, card.incarnation, card.transfer, pool.digest, blocks, compute_s)


def _considered(
    pool: Pool,
    settings: CostSettings,
    offers: list[_Offer],
    chosen: _Offer,
    seen: int,
    near: int,
    near_s: float,
    among: int | None,
) -> Considered:
    best = sorted(offers, key=_seconds)[:_SHOWN]  # For so few it takes half of what `heapq.nsmallest` does.
    if all(offer is not chosen for offer in best):
        best.append(chosen)
    shown = tuple([_candidate(offer, settings.disturbance) for offer in best])
    total = len(pool.prefill) + len(pool.decode) if among is None else among
    return Considered(shown, max(0, seen - len(shown)), near, near_s, total - seen)


def _candidate(offer: _Offer, disturbance: float) -> Candidate:
    seconds, _, worker, cached, tokens, local, transfer, borrowed = offer
    speed = worker.prefill_tokens_s
    queue = worker.queued_tokens / speed
    compute = tokens / speed * (1 + disturbance * worker.sequences if local else 1)
    return Candidate(
        worker.card.id,
        worker.card.role,
        seconds,
        queue,
        compute,
        transfer,
        max(0.0, seconds - queue - compute - transfer),
        worker.queued_tokens,
        worker.sequences,
        worker.blocks_free,
        cached,
        tokens,
        borrowed,
    )


def _busy(offer: _Offer) -> tuple[float, float]:
    return (offer[2].sequences, offer[2].queued_tokens)
