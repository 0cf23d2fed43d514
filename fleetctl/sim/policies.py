"""Other ways to choose workers, to compare ours with: stand-ins for a router's index and roster.

They are the simulator's own; a router that serves has none of them. What a policy leaves open (whether a
decode worker computes a short prompt itself, admission, retries) is the router's own code all the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from fleet.events import KvDigest, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, RequestId, WorkerId
from fleet.member import Role
from router.flow import Flow
from router.prefix_index import Outcome, PrefixIndex
from router.roster import Pool, Roster, Standing
from router.watcher import Router


class Policy(StrEnum):
    PRECISE = "precise"
    """The router as it serves: proven index, cost in seconds."""
    APPROXIMATE = "approximate"
    """The same cost, and an index that knows only what this router itself sent where."""
    LEAST_LOADED = "least_loaded"
    """The worker with the least work, whatever it caches."""
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


def install(policy: Policy, router: Router, seed: int) -> None:
    """Gives a router, before it runs, the policy's way to choose."""
    if policy is Policy.PRECISE:
        return
    index = _Hints(router.settings.index) if policy is Policy.APPROXIMATE else _Blind(router.settings.index)
    router.index = index
    if policy is not Policy.APPROXIMATE:
        router.roster = _OneEach(router, policy, seed)
    router.flow = Flow(router.settings, router.roster, index, router.links)


class _Hints(PrefixIndex):
    """No worker is ever proven, so that each is matched by what was sent there; nobody asks for snapshots."""

    def apply(self, message: KvEvents) -> Outcome:
        return Outcome.OLD

    def load_snapshot(self, part: KvSnapshot) -> Outcome:
        return Outcome.OLD

    def check(self, worker: WorkerId, incarnation: Incarnation, digest: KvDigest) -> Outcome:
        return Outcome.OLD

    def doubted(self, worker: WorkerId) -> str | None:
        return None


class _Blind(_Hints):
    def sent(self, worker: WorkerId, names: object, now: float) -> None:
        pass

    def match(self, names: Sequence[int], now: float, tier: Tier = Tier.DEVICE) -> dict[WorkerId, int]:
        return {}


class _OneEach(Roster):
    """Shows of each pool the one prefill and the one decode worker whose turn it is. A turn lasts until
    something was sent to the worker, so that looking is not choosing."""

    def __init__(self, router: Router, policy: Policy, seed: int) -> None:
        watch = router.settings.watch
        super().__init__(router.settings.unknown, mass_share=watch.mass_share)
        self._policy = policy
        self._chance = random.Random(f"{seed} {router.life}")
        self._turns = {role: self._next(-1) for role in Role}

    def pools(self, model: str) -> tuple[Pool, ...]:
        pick = self._pick
        return tuple(
            replace(pool, prefill=pick(Role.PREFILL, pool.prefill), decode=pick(Role.DECODE, pool.decode))
            for pool in super().pools(model)
        )

    def sent(self, worker: WorkerId, request: RequestId, tokens: int, blocks: int) -> None:
        super().sent(worker, request, tokens, blocks)
        if (standing := self.get(worker)) is not None:
            role = standing.card.role
            self._turns[role] = self._next(self._turns[role])

    def _next(self, turn: int) -> int:
        return turn + 1 if self._policy is Policy.ROUND_ROBIN else self._chance.randrange(1 << 30)

    def _pick(self, role: Role, workers: tuple[Standing, ...]) -> tuple[Standing, ...]:
        if not workers:
            return ()
        turn = self._turns[role]
        if self._policy is not Policy.LEAST_LOADED:
            return (workers[turn % len(workers)],)
        # Equals take turns by chance: else the first one would have all of an idle fleet.
        first = turn % len(workers)
        return (min(workers[first:] + workers[:first], key=_work_s),)


def _work_s(worker: Standing) -> float:
    return worker.queued_tokens / worker.prefill_tokens_s + worker.sequences * worker.decode_step_s
