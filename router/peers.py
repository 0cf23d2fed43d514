"""The other routers of the fleet: what they send, counted here; and what this one has to tell them. Pure.


A worker's report counts what has reached it. What has not, each router tells the others: small changes as
they come, and every now and then all of it. Changes make routers see each other's choices at once; the whole
makes up for changes that were lost, came twice or late, and for routers that have just begun to listen. What
a worker reports goes before what a router says of it, so that nothing is counted for long that is not there.

They also share what each API key has asked of them, so that its limits are those of all routers together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from fleet.events import Dispatch, KeyUse, RouterMoves, Settled
from fleet.ids import Incarnation, RequestId, WorkerId
from router.roster import Roster
from router.settings import PeerSettings


class Limits(Protocol):
    """What the ingress counts of API keys."""

    tell: Callable[[], None]
    """To be called when there is something to take."""

    def take(self, whole: bool) -> tuple[KeyUse, ...]:
        """What has changed since it was last taken; `whole`: and all that runs."""
        ...

    def heard(self, life: Incarnation, uses: Sequence[KeyUse], whole: bool, now: float) -> None:
        """Another router says this; `whole`: keys that it does not name run nothing there."""
        ...

    def forget(self, life: Incarnation) -> None:
        """Nothing of that router is counted any more."""
        ...


class NoLimits:
    """Of a router without an ingress."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] = lambda: None

    def take(self, whole: bool) -> tuple[KeyUse, ...]:
        return ()

    def heard(self, life: Incarnation, uses: Sequence[KeyUse], whole: bool, now: float) -> None: ...

    def forget(self, life: Incarnation) -> None: ...


class Outbox:
    """What this router did since its last message."""

    def __init__(self, router: str, life: Incarnation, roster: Roster, settings: PeerSettings) -> None:
        self._router = router
        self._life = life
        self._roster = roster
        self._settings = settings
        self._moves: dict[tuple[WorkerId, RequestId], Dispatch | Settled] = {}
        """The last of each."""
        self.limits: Limits = NoLimits()
        self._keys_moved = False
        self._sequence = 0
        self._whole_at = -math.inf

    def __len__(self) -> int:
        return len(self._moves)

    def add(self, move: Dispatch | Settled) -> None:
        self._moves[move.worker, move.request] = move

    def keys_moved(self) -> None:
        self._keys_moved = True

    def clear(self) -> None:
        """Nobody listens; who will is told the whole first."""
        self._moves.clear()
        self._whole_at = -math.inf

    def due(self, now: float) -> float:
        """When there is something to tell."""
        return now if self._moves or self._keys_moved else self._whole_at

    def take(self, now: float) -> RouterMoves:
        """The next message. Sent or lost, it is not told again but as part of the whole."""
        settings = self._settings
        whole = now >= self._whole_at
        moves, self._moves = self._moves, {}
        self._keys_moved = False
        if whole:
            self._whole_at = now + settings.whole_s
            sent = self._roster.unreported()
        else:
            sent = tuple(move for move in moves.values() if isinstance(move, Dispatch))
        self._sequence += 1
        return RouterMoves(
            self._router,
            self._life,
            self._sequence,
            whole,
            sent[-settings.max_dispatches :],
            tuple(move for move in moves.values() if isinstance(move, Settled)),
            self.limits.take(whole)[-settings.max_dispatches :],
        )


class Heard(StrEnum):
    """What became of a message."""

    APPLIED = "applied"
    GAP = "gap"
    """Applied, and messages before it are missing: the next whole makes up for them."""
    LATE = "late"
    """It was heard before, or a later one was: not applied."""
    OWN = "own"


@dataclass(slots=True)
class _Peer:
    router: str
    sequence: int
    heard_at: float
    silent: bool = False


class Peers:
    """A fold of what other routers say into the roster."""

    def __init__(self, life: Incarnation, roster: Roster, settings: PeerSettings) -> None:
        """`life`: of this router, whose own messages come back to it."""
        self._life = life
        self._roster = roster
        self._settings = settings
        self._peers: dict[Incarnation, _Peer] = {}
        self._listed: frozenset[Incarnation] = frozenset()
        self._nameless = 0
        self.limits: Limits = NoLimits()

    @property
    def others(self) -> int:
        """Routers that there are besides this one, as far as is known."""
        return len(self._listed | self._heard()) + self._nameless

    @property
    def unseen(self) -> int:
        """Of those, the ones whose choices are not seen here."""
        return len(self._listed - self._heard()) + self._nameless

    def apply(self, moves: RouterMoves, now: float) -> Heard:
        if moves.life == self._life:
            return Heard.OWN
        peer = self._peers.get(moves.life)
        if peer is None:
            # Nobody knows what was said before, unless there was nothing.
            peer = self._peers[moves.life] = _Peer(moves.router, moves.sequence - 1, now)
        if moves.sequence <= peer.sequence:
            return Heard.LATE
        gap = moves.sequence > peer.sequence + 1
        peer.sequence, peer.heard_at, peer.silent = moves.sequence, now, False
        for settled in moves.settled:
            self._roster.other_settled(moves.life, settled)
        if moves.whole:
            kept = {(dispatch.worker, dispatch.request) for dispatch in moves.sent}
            self._roster.other_sent_only(moves.life, kept)
        for dispatch in moves.sent:
            if not moves.whole:
                # Sent there once more: what is known of it is of the time before.
                self._roster.other_settled(moves.life, Settled(dispatch.worker, dispatch.request))
            self._roster.other_sent(moves.life, dispatch, now)
        self.limits.heard(moves.life, moves.keys, moves.whole, now)
        self._tell_unseen()
        return Heard.GAP if gap else Heard.APPLIED

    def listed(self, lives: Collection[Incarnation], nameless: int = 0) -> None:
        """The registry shows these routers, and so many that do not say which life they are in. One that
        is not shown any more is counted again when it speaks."""
        now_listed = frozenset(lives) - {self._life}
        for life in self._listed - now_listed:
            if (peer := self._peers.get(life)) is not None:
                peer.silent = True
                self._forget(life)
        self._listed, self._nameless = now_listed, nameless
        self._tell_unseen()

    def expire(self, now: float) -> tuple[str, ...]:
        """Names of those that have been silent for too long, each once."""
        silent_s, gone = self._settings.silent_s, []
        for life, peer in list(self._peers.items()):
            silence = now - peer.heard_at
            if silence > silent_s and not peer.silent:
                peer.silent = True
                self._forget(life)
                gone.append(peer.router)
            # Remembered for a while longer, so that its late messages are known to be late.
            if peer.silent and life not in self._listed and silence > 10 * silent_s:
                del self._peers[life]
        self._tell_unseen()
        return tuple(gone)

    def _forget(self, life: Incarnation) -> None:
        self._roster.forget_other(life)
        self.limits.forget(life)

    def _heard(self) -> frozenset[Incarnation]:
        return frozenset(life for life, peer in self._peers.items() if not peer.silent)

    def _tell_unseen(self) -> None:
        self._roster.routers = 1 + self.unseen
