"""Where a request goes next, by what is known of it so far. Pure.

Who reads the KV that waits under a ticket; who computes it, where there is none; who may begin early.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fleet.block_hash import HashKeys
from fleet.errors import BadRequest, FleetError, NotFound, Unavailable
from fleet.handoff import DecodeJob, KvTicket, PrefillJob
from fleet.ids import Incarnation
from fleet.request import FinishReason, Request
from router.cost import Ask, Choice, choose_decode, choose_prefill
from router.prefix_index import PrefixIndex
from router.roster import Pool, Roster
from router.run import Terms
from router.sessions import Sessions
from router.settings import RouterSettings


@dataclass(slots=True, eq=False)
class Known:
    """What is known of one request: shared by all that carry it."""

    request: Request
    terms: Terms
    due: float
    """When it is overdue, on the loop's clock."""
    tie: int
    """Even over requests, the same for one: see `router.cost.Ask`."""
    generated: list[int] = field(default_factory=list)
    """Tokens that were said; those that follow are told of them, so that none is said twice."""
    ticket: KvTicket | None = None
    """To be given to a decode worker while it is fresh."""
    pool: Pool | None = None
    """Of the first leg: a request never goes on with other weights."""
    avoid: set[Incarnation] = field(default_factory=set)
    """Lives of workers that refused or failed it."""
    refused: set[Incarnation] = field(default_factory=set)
    """Of those, the ones that were only full."""
    lost: int = 0
    """Legs that failed."""
    verdict: Exception | None = None
    """Why it is to end, where that was decided outside its reading: stopped, turned away or overdue."""
    names: dict[tuple[str, int], Sequence[int]] = field(default_factory=dict)
    """Index names of its leading full blocks, by digest of the pool and their number."""

    @classmethod
    def of(cls, request: Request, terms: Terms, accepted: float) -> Known:
        digest = hashlib.blake2b(request.id.encode(), digest_size=8).digest()
        return cls(request, terms, accepted + request.deadline_s, int.from_bytes(digest, "little"))

    @property
    def needed(self) -> int:
        """Tokens whose KV the next leg needs."""
        return len(self.request.prompt) + (0 if self.ticket is not None else len(self.generated))

    def left(self, now: float) -> Request:
        """The request with the time that it has left: durations cross the wire, never instants."""
        return replace(self.request, deadline_s=max(0.0, self.due - now))

    def complete(self) -> FinishReason | None:
        """How it has finished, when all its tokens were said and only the end was lost."""
        sampling, generated = self.request.sampling, self.generated
        if not generated:
            return None
        if generated[-1] in sampling.stop_token_ids and len(generated) > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(generated) >= sampling.max_tokens else None


class Found(NamedTuple):
    """Who takes the next leg, and its job."""

    pool: Pool
    choice: Choice
    job: PrefillJob | DecodeJob


class Chooser:
    """One for all requests. `gone`: workers to be passed over besides those that a request avoids."""

    def __init__(
        self, settings: RouterSettings, roster: Roster, index: PrefixIndex, sessions: Sessions
    ) -> None:
        self._cost = settings.cost
        self._early_handoff = settings.flow.early_handoff
        self._roster = roster
        self._index = index
        self._sessions = sessions

    def reader(self, known: Known, now: float, gone: set[Incarnation]) -> Found | None:
        """A decode worker that goes on with the KV under the request's ticket."""
        ticket = known.ticket
        assert ticket is not None
        for pool in self._pools(known):
            if pool.digest == ticket.fingerprint:
                choice = choose_decode(pool, self._ask(known, pool, now, gone), self._cost, ticket=True)
                if choice is not None:
                    return Found(pool, choice, DecodeJob(0, known.left(now), tuple(known.generated), ticket))
        return None

    def computer(self, known: Known, now: float, gone: set[Incarnation]) -> Found | None:
        """A worker that computes the prompt, and what was generated so far."""
        pool: Pool | None = None
        best: Choice | None = None
        for one in self._pools(known):
            ask = self._ask(known, one, now, gone)
            choice = (
                choose_decode(one, ask, self._cost, ticket=False)
                if known.generated
                else choose_prefill(one, ask, self._cost)
            )
            if choice is not None and (best is None or choice.seconds < best.seconds):
                pool, best = one, choice
        if pool is None or best is None:
            return None
        request = known.left(now)
        if known.generated or best.local:
            return Found(pool, best, DecodeJob(0, request, tuple(known.generated), None, best.holder))
        return Found(pool, best, PrefillJob(0, request, self._early_handoff, best.holder))

    def early(self, known: Known, ticket: KvTicket, now: float, gone: set[Incarnation]) -> Found | None:
        """A decode worker that brings what is final of a prompt that is still being computed."""
        for pool in self._pools(known):
            if pool.digest == ticket.fingerprint:
                choice = choose_decode(pool, self._ask(known, pool, now, gone), self._cost, ticket=True)
                if choice is None:
                    return None
                return Found(pool, choice, DecodeJob(0, known.left(now), (), ticket))
        return None

    def crowded(self, known: Known, limit_s: float) -> set[Incarnation]:
        """Prefill workers with more than so many seconds of prompts before them."""
        return {
            worker.card.incarnation
            for pool in self._pools(known)
            for worker in pool.prefill
            if worker.queued_tokens / worker.prefill_tokens_s > limit_s
        }

    def names(self, known: Known, pool: Pool) -> Sequence[int]:
        """Of the full blocks among the tokens that the next leg needs."""
        tokens = known.needed
        place = pool.digest, tokens // pool.block_size
        names = known.names.get(place)
        if names is None:
            request = known.request
            keys = HashKeys(pool.digest, pool.block_size, request.adapter, request.salt)
            whole = request.prompt if tokens <= len(request.prompt) else (*request.prompt, *known.generated)
            names = known.names[place] = self._index.names(whole[:tokens], keys)
        return names

    def check_pins(self, known: Known) -> None:
        """Whoever pins wants to know what that worker does: no other one answers for it."""
        for worker in known.terms.pins:
            standing = self._roster.get(worker)
            if standing is None:
                raise Unavailable(f"the request is pinned to worker {worker}, which is not here")
            if not standing.usable or standing.card.model != known.request.model:
                state, link = standing.card.state, standing.link
                raise Unavailable(
                    f"the request is pinned to worker {worker}, which is {state} with its session {link} "
                    f"and serves {standing.card.model}"
                )

    def nobody(self, request: Request) -> FleetError:
        """Why no worker can take the request now."""
        roster, model, length = self._roster, request.model, len(request.prompt)
        why = roster.why_not(model)
        if why is not None:
            unknown = roster.models() and model not in roster.models()
            return NotFound(f"the model {model} does not exist here") if unknown else Unavailable(why)
        limit = max(pool.max_tokens for pool in roster.pools(model))
        if length >= limit:
            return BadRequest(
                f"the prompt has {length} tokens; {model} takes at most {limit - 1}, and one for the answer",
                code="context_length_exceeded",
            )
        return Unavailable(f"no worker of {model} that is left could go on with this request")

    def _pools(self, known: Known) -> tuple[Pool, ...]:
        pools = self._roster.pools(known.request.model)
        if known.pool is None or not known.generated:
            return pools
        mine = known.pool.fingerprint
        return tuple(
            p for p in pools if (p.fingerprint.model, p.fingerprint.tokenizer) == (mine.model, mine.tokenizer)
        )

    def _ask(self, known: Known, pool: Pool, now: float, gone: set[Incarnation]) -> Ask:
        # A prompt that is scored is computed from its start, whoever holds it.
        scored = known.request.sampling.prompt_logprobs >= 0 and not known.generated
        return Ask(
            tokens=known.needed,
            matched={} if scored else self._index.match(self.names(known, pool), now),
            tie=known.tie,
            avoid=known.avoid | gone,
            routers=self._roster.routers,
            lost=(known.avoid - known.refused) | gone,
            prefer=self._sessions.last(known.terms.tenant, known.terms.session),
            only=known.terms.pins,
        )
