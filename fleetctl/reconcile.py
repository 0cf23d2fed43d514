"""What the supervisor does next: from wanted counts and its children to actions, each with its why. Pure.

Level-triggered: `decide` looks only at what is, so that a lost or repeated notice changes nothing.
A child that an operator drains is no longer counted, so that a replacement starts while it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet.targets import Desired
from fleetctl.words import (
    SERVERS,
    WORKERS,
    Action,
    Child,
    Closing,
    Decision,
    Forget,
    Kill,
    Kind,
    Phase,
    Policy,
    Start,
    Stop,
)

CLOSING_ORDER: tuple[tuple[Kind, ...], ...] = (
    (Kind.PLANNER,),
    (Kind.ROUTER,),
    WORKERS,
    (Kind.NATS,),
    (Kind.ETCD,),
)
"""The planner first, which would change what goes down; then the router: it takes no new request and ends the
running ones while workers still serve; the control plane last: draining workers need it."""

REFUSED = 2
"""Exit code of a process that does not accept its settings."""

COUNTED = (Phase.STARTING, Phase.READY, Phase.TURNING, Phase.CRASHED)


def decide(
    desired: Desired,
    children: Sequence[Child],
    now: float,
    policy: Policy,
    closing: Closing = Closing.NO,
) -> Decision:
    """Actions to take now, and when to look again if nothing happens until then."""
    actions: list[Action] = []
    wakes: list[float] = []
    for child in children:
        overdue = _overdue(child, policy, closing)
        if overdue is None:
            continue
        at, why = overdue
        if now >= at:
            actions.append(Kill(child.name, why))
        else:
            wakes.append(at)
    if closing is Closing.NO:
        for kind in Kind:
            _reconcile(kind, desired.of(kind), children, now, actions, wakes)
    else:
        _close(children, closing, actions)
    return Decision(tuple(actions), min(wakes, default=None))


def _overdue(child: Child, policy: Policy, closing: Closing) -> tuple[float, str] | None:
    """When this child has used up its time, and what to say then; None while no clock runs."""
    if child.killed:
        return None
    if child.phase is Phase.STARTING and closing is Closing.NO:
        return child.since + policy.ready_limit_s, f"not ready after {policy.ready_limit_s:g} s"
    if child.phase is Phase.STOPPING:
        limit = stop_limit_s(child.kind, policy, closing)
        return child.since + limit, f"still running {limit:g} s after SIGTERM"
    if child.phase in (Phase.READY, Phase.TURNING, Phase.DRAINING) and child.silent_since is not None:
        limit = policy.silent_limit_s
        return child.silent_since + limit, f"frozen: shows no sign of life for {limit:g} s"
    return None


def stop_limit_s(kind: Kind, policy: Policy, closing: Closing) -> float:
    if closing is Closing.HURRIED:
        return policy.hurry_limit_s
    return policy.server_limit_s if kind in SERVERS else policy.drain_limit_s


def _reconcile(
    kind: Kind,
    want: int,
    children: Sequence[Child],
    now: float,
    actions: list[Action],
    wakes: list[float],
) -> None:
    have = [child for child in children if child.kind is kind and child.phase in COUNTED]
    leaving = sum(child.kind is kind for child in children) - len(have)
    gone = victims(have, len(have) - want)
    for child, reason in gone:
        why = f"{len(have)} {kind}, {want} wanted; {reason}"
        actions.append(Forget(child.name, why) if child.phase is Phase.CRASHED else Stop(child.name, why))
    if blocked_by(kind, children) is not None:
        return
    for child in have:
        if child.phase is not Phase.CRASHED or any(child is victim for victim, _ in gone):
            continue
        if now >= child.retry_at:
            actions.append(Start(kind, child.name, f"again, after {_crashes(child.failures)}"))
        else:
            wakes.append(child.retry_at)
    if kind in WORKERS:
        note = f", {leaving} leaving" if leaving else ""
        why = f"{len(have)} {kind}{note}, {want} wanted"
        actions.extend(Start(kind, None, why) for _ in range(want - len(have)))
    elif want and not have and not leaving:
        # A single has one port and one name: its successor starts when it is gone.
        actions.append(Start(kind, None, f"the fleet needs {kind}"))


def blocked_by(kind: Kind, children: Sequence[Child]) -> Kind | None:
    """The server without which a child of this kind could not register; it starts first."""
    if kind in SERVERS:
        return None
    ready = {child.kind for child in children if child.phase is Phase.READY}
    return next((server for server in SERVERS if server not in ready), None)


def victims(have: Sequence[Child], count: int) -> list[tuple[Child, str]]:
    """The `count` children to let go, and why these: first those that serve nobody, frozen ones among them;
    then those whose load is unknown, the youngest first: where others tell theirs, one is new, or frozen and
    not yet known to be; then the least loaded."""

    def order(child: Child) -> tuple[int, int, float]:
        if child.phase is Phase.CRASHED:
            rank = 0
        elif child.phase is Phase.STARTING:
            rank = 2
        elif child.silent_since is not None:
            rank = 1
        else:
            rank = 3 if child.load is None else 4
        return rank, child.load or 0, -child.since

    def reason(child: Child) -> str:
        if child.phase is not Phase.READY:
            return f"this one is {child.phase}"
        if child.silent_since is not None:
            return "this one shows no sign of life"
        if child.load is None:
            return "this one is the youngest whose load is unknown"
        return f"this one is the least loaded, {child.load} requests"

    return [(child, reason(child)) for child in sorted(have, key=order)[: max(0, count)]]


def _close(children: Sequence[Child], closing: Closing, actions: list[Action]) -> None:
    for child in children:
        if child.phase is Phase.CRASHED:
            actions.append(Forget(child.name, "the fleet goes down"))
    alive = [child for child in children if child.phase is not Phase.CRASHED]
    for stage in CLOSING_ORDER:
        here = [child for child in alive if child.kind in stage]
        for child in here:
            # One that an operator drains gets SIGTERM too, so that a limit runs for it.
            if child.phase is not Phase.STOPPING:
                actions.append(Stop(child.name, "the fleet goes down"))
        if here and closing is Closing.ORDERLY:
            return


def first_starts(desired: Desired, policy: Policy) -> list[Kind]:
    """Which processes a fleet that has none starts, in order: what `decide` wants where each start is a
    success."""
    children: list[Child] = []
    while actions := decide(desired, children, 0.0, policy).actions:
        for action in actions:
            assert isinstance(action, Start), "nobody is to end who has just started"
            children.append(Child(f"{action.kind}-{len(children)}", action.kind, Phase.READY, 0.0))
    return [child.kind for child in children]


def settled(desired: Desired, children: Sequence[Child]) -> bool:
    """Whether every child that is wanted is ready, and none is on its way out."""
    if any(child.phase is not Phase.READY for child in children):
        return False
    return all(sum(child.kind is kind for child in children) == desired.of(kind) for kind in Kind)


# What becomes of a child. Each gives the child after the event.


def started(child: Child, pid: int, now: float) -> Child:
    return replace(
        child, phase=Phase.STARTING, since=now, pid=pid, load=None, silent_since=None, killed=False
    )


def became(child: Child, phase: Phase, now: float) -> Child:
    """Ready, turning, draining or stopping; `child` itself where that is nothing new or comes too late."""
    if child.phase is phase or child.phase in (Phase.CRASHED, Phase.STOPPING):
        return child
    if phase is Phase.READY:
        # It showed itself: that it did not while it started is no silence.
        return replace(child, phase=phase, since=now, unready=0, silent_since=None)
    return replace(child, phase=phase, since=now)


def answered(child: Child, alive: bool, load: int | None, now: float) -> Child:
    """After a look at it: `alive` when it showed its card or answered."""
    silent = None if alive else (now if child.silent_since is None else child.silent_since)
    return replace(child, load=load, silent_since=silent)


def exited(
    child: Child, code: int, now: float, policy: Policy, jitter: float, closing: Closing = Closing.NO
) -> tuple[Child | None, str]:
    """The slot after its process ended, None when it is done with; and why.

    `code` as in subprocess: negative is a signal. `jitter` in [0, 1) spreads children that died together.
    """
    if child.phase in (Phase.STOPPING, Phase.DRAINING) or closing is not Closing.NO:
        return None, f"left, {exit_text(code)}"
    ran_well = child.phase is Phase.READY and now - child.since >= policy.well_s
    failures = 1 if ran_well else child.failures + 1
    unready = child.unready
    if child.phase is Phase.STARTING:
        # Killed because it took too long, or refusing its settings: trying again would change nothing.
        hopeless = child.killed or code == REFUSED
        unready = max(policy.attempts, unready + 1) if hopeless else unready + 1
    pause = back_off_s(failures, policy, jitter)
    waiting = replace(
        child,
        phase=Phase.CRASHED,
        since=now,
        pid=None,
        load=None,
        silent_since=None,
        failures=failures,
        unready=unready,
        restarts=child.restarts + 1,
        retry_at=now + pause,
        killed=False,
    )
    before = " before it was ready" if child.phase is Phase.STARTING else ""
    return waiting, f"ended{before}, {exit_text(code)}; starts again in {pause:.1f} s"


def back_off_s(failures: int, policy: Policy, jitter: float) -> float:
    """Seconds: doubles with each failure up to the cap, of which the upper half is jittered."""
    whole = min(policy.back_off_most_s, policy.back_off_s * 2.0 ** min(failures - 1, 30))
    return whole * (0.5 + 0.5 * jitter)


def failing(child: Child, policy: Policy) -> str | None:
    """Why this child is an error and not merely late; None while there is hope."""
    if child.unready < policy.attempts:
        return None
    return f"{child.name} did not become ready, after {_crashes(child.failures)}"


def _crashes(failures: int) -> str:
    return "1 failure" if failures == 1 else f"{failures} failures"


def exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names = {2: "SIGINT", 6: "SIGABRT", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
    return names.get(-code, f"signal {-code}")
