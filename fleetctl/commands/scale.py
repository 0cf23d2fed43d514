"""`scale`: how many workers of each role there are to be, or that the planner is to say so."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fleet.errors import BadRequest, Unavailable
from fleet.targets import MOST_BUDGET, Desired, Mode
from fleetctl.machine import memory
from fleetctl.options import DRY_RUN, Target, fleet_options, going_on
from fleetctl.reconcile import victims
from fleetctl.words import WORKERS, Child, FleetPicture, FleetState, Kind, Phase

if TYPE_CHECKING:
    from fleet.registry import Registry, View
    from fleet.targets import LastDecision

AUTO = "auto"
_TRIES = 5
"""How often a change is tried again where somebody else changes the same at the same moment."""

_AS_IT_IS = "nothing to change"
_NOBODY = "nobody supervises this fleet here: its own controller is to act on it"


def _counts(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> dict[str, int] | None:
    """None: `auto`."""
    if list(values) == [AUTO]:
        return None
    counts: dict[str, int] = {}
    for value in values:
        match = re.fullmatch(r"(prefill|decode)=(\d+)", value)
        if match is None:
            both = " alone" if value == AUTO else ""
            raise click.BadParameter(f"{value!r} is not prefill=NUMBER or decode=NUMBER, or auto{both}")
        if match[1] in counts:
            raise click.BadParameter(f"{match[1]} is given twice")
        counts[match[1]] = int(match[2])
    return counts


@click.command()
@click.argument("counts", nargs=-1, required=True, callback=_counts, metavar="prefill=N decode=M | auto")
@fleet_options()
@click.option("--wait", is_flag=True, help="Return when the fleet is as wanted and nobody leaves any more.")
@DRY_RUN
@click.option(
    "--budget", type=click.IntRange(1, MOST_BUDGET), help="Most workers that the planner may want. With auto."
)
@click.option("--advise", is_flag=True, help="The planner only says what it would do. With auto.")
@click.option(
    "--kubernetes", metavar="NAMESPACE/NAME", help="An InferenceFleet of a cluster, not a fleet by its etcd."
)
@click.option("--context", default="", help="Of the kubeconfig; its current one by default.")
@click.option(
    "--limit", type=click.FloatRange(0), default=180.0, show_default=True, help="Longest to --wait, seconds."
)
def scale(
    target: Target,
    counts: dict[str, int] | None,
    wait: bool,
    dry_run: bool,
    budget: int | None,
    advise: bool,
    kubernetes: str | None,
    context: str,
    limit: float,
) -> None:
    """Set how many workers of a role there are to be; those that go finish their requests first.

    With auto the planner decides from now on, until counts are given again. Both counts, and who decides,
    change at once.
    """
    if counts is not None and (budget is not None or advise):
        raise click.UsageError("--budget and --advise go with auto: fleetctl scale auto --budget 8")
    if context and kubernetes is None:
        raise click.UsageError("--context goes with --kubernetes NAMESPACE/NAME")
    if kubernetes is not None:
        from fleetctl.cluster_scale import Wish, scale_in_cluster

        wish = Wish(counts, budget, advise)
        asyncio.run(scale_in_cluster(target, kubernetes, context, wish, wait, dry_run, limit))
        return
    asyncio.run(_scale(target, counts, wait, dry_run, budget, advise, limit))


async def _scale(
    target: Target,
    counts: dict[str, int] | None,
    wait: bool,
    dry_run: bool,
    budget: int | None,
    advise: bool,
    limit: float,
) -> None:
    etcd, state = target.etcd(), target.state()
    from msgspec import to_builtins

    from fleetctl.connect import connected
    from fleetctl.picture import no_answer, take_picture

    async with connected(etcd, own=target.given_etcd is None) as (registry, wire):
        try:
            _, old = await _wanted(registry, target.fleet)
        except Unavailable:
            raise no_answer(etcd) from None
        new = _changed(old, counts, budget, advise)
        before = await take_picture(registry, wire, target.fleet, etcd, state)
        if not dry_run:
            old, new = await _write(registry, target.fleet, counts, budget, advise)
        said, warning = _said(old, new), ""
        if state is not None and counts is not None:
            warning = too_much(before, new, memory().get("MemAvailable"))
        if warning and not target.as_json:
            click.secho(f"warning: {warning}", fg="yellow", err=True)
        decision = before.decision
        fields: dict[str, Any] = {
            "fleet": target.fleet,
            "before": {str(kind): old.of(kind) if old else 0 for kind in WORKERS},
            "desired": {str(kind): new.of(kind) for kind in WORKERS},
            "mode": str(new.mode),
            "budget": new.budget,
            "dry_run": dry_run,
            "warning": warning,
        }
        if dry_run:
            leaving = [worker for kind in WORKERS for worker in would_leave(before, kind, new.of(kind))]
            lines = [
                f"would set {said}" if said else _AS_IT_IS,
                *(f"would drain {name}: {why}" for name, why in leaving),
            ]
            if counts is None and decision is not None:
                lines.append(
                    "the planner's last decision was "
                    f"prefill={decision.prefill} decode={decision.decode}: {decision.why}"
                )
            fields["decision"] = to_builtins(decision) if counts is None else None
            target.say("\n".join(lines), **fields, drain=[name for name, _ in leaving])
            return
        said = f"set {said}" if said else _AS_IT_IS
        if wait:
            with going_on(f"{said}, and that stays"):
                if counts is None:
                    seen = decision.at if decision is not None else 0.0
                    decision = await _wait_decided(registry, target.fleet, new.mode, seen, limit)
                    said += f"; it wants prefill={decision.prefill} decode={decision.decode}: {decision.why}"
                else:
                    await _wait_settled(target, registry, new, counts, limit)
                    said += "; done"
        fields["decision"] = to_builtins(decision) if wait and counts is None else None
        target.say(said if state else f"{said}; {_NOBODY}", **fields, settled=wait)


def _changed(old: Desired | None, counts: dict[str, int] | None, budget: int | None, advise: bool) -> Desired:
    if counts is None:
        if old is None:
            raise BadRequest("no counts are set yet: give both first, prefill=N and decode=M")
        mode = Mode.ADVISE if advise else Mode.ACT
        return replace(old, mode=mode, budget=budget if budget is not None else old.budget)
    if old is None and len(counts) < len(WORKERS):
        raise BadRequest("no counts are set yet: give both, prefill=N and decode=M")
    kept = {str(kind): old.of(kind) if old else 0 for kind in WORKERS}
    return Desired(counts.get("prefill", kept["prefill"]), counts.get("decode", kept["decode"]))


async def _wanted(registry: Registry, fleet: str) -> tuple[int, Desired | None]:
    """The revision of what is wanted, 0 for none, and what it is; None: nothing that can be read. Raises
    `Unavailable`."""
    from fleet.member import desired_key
    from fleetctl.picture import readable_desired

    entry = await registry.entry(desired_key(fleet))
    return (0, None) if entry is None else (entry.modified, readable_desired(entry.value))


async def _write(
    registry: Registry, fleet: str, counts: dict[str, int] | None, budget: int | None, advise: bool
) -> tuple[Desired | None, Desired]:
    """One change of all, of what stands there at that moment: that, and what stands there then."""
    from fleet.member import desired_key
    from fleet.registry import Condition
    from fleet.targets import format_desired

    key = desired_key(fleet)
    for _ in range(_TRIES):
        revision, old = await _wanted(registry, fleet)
        new = _changed(old, counts, budget, advise)
        if await registry.put_if([Condition(key, modified=revision)], {key: format_desired(new)}) is not None:
            return old, new
    raise Unavailable("what is wanted is being changed by others all the time; try again")


def _said(old: Desired | None, new: Desired) -> str:
    """What is another than before; empty: nothing."""
    changes = [
        f"{kind} {old.of(kind) if old else 0} → {new.of(kind)}"
        for kind in WORKERS
        if new.of(kind) != (old.of(kind) if old else 0)
    ]
    was = Mode.OFF if old is None else old.mode
    if new.mode is not was:
        changes.append(f"planner {was} → {new.mode}")
    if new.mode is not Mode.OFF and new.budget != (old.budget if old else None):
        changes.append(f"budget {new.budget}")
    said = ", ".join(changes)
    if said and new.mode is Mode.OFF and not new.decode:
        said += "; without a decode worker every request is refused with 503"
    return said


def too_much(picture: FleetPicture, new: Desired, free: int | None) -> str:
    """Says so where more workers than there are would take more memory than is free, by those that serve."""
    parts = ("memory_weights_bytes", "memory_kv_bytes", "memory_activations_bytes")
    each = max(
        (sum((row.counters or {}).get(part, 0) for part in parts) for row in picture.workers), default=0
    )
    more = new.prefill + new.decode - len(picture.workers)
    if free is None or more <= 0 or more * each <= free:
        return ""
    asked, there = (size / (1 << 30) for size in (more * each, free))
    return (
        f"{more} more workers may take {asked:.1f} GiB (weights and KV), and {there:.1f} GiB are free here; "
        "less KV each: fleetctl up --set engine.kv-memory-bytes=…"
    )


def would_leave(picture: FleetPicture, kind: Kind, want: int) -> list[tuple[str, str]]:
    """Ids and reasons of those that the supervisor would let go now; loads may change until then."""
    phases = {
        "starting": Phase.STARTING,
        "ready": Phase.READY,
        "silent": Phase.READY,
        "stalled": Phase.READY,
        "turning": Phase.TURNING,
        "crashed": Phase.CRASHED,
    }
    have = []
    for row in picture.workers:
        if row.role == kind and row.state in phases:
            load = None if row.running is None or row.waiting is None else row.running + row.waiting
            silent_since = 0.0 if row.state == "silent" else None
            have.append(Child(row.id, kind, phases[row.state], 0.0, row.pid, load, silent_since))
    return [(child.name, why) for child, why in victims(have, len(have) - want)]


async def _wait_settled(
    target: Target, registry: Registry, desired: Desired, counts: dict[str, int], limit_s: float
) -> None:
    """Until as many as wanted are ready and nobody is on its way out, by the cards and by the supervisor
    where there is one here; says how far it is. `counts`: what was asked for. What others want of the other
    role meanwhile is waited for too; that they want other counts than these is an error."""
    from fleet.member import desired_key
    from fleetctl.picture import cards_in, readable_desired, wait_view

    have, overruled = "", False

    def settled(view: View) -> bool:
        nonlocal desired, have, overruled
        data = view.values.get(desired_key(target.fleet))
        desired = (readable_desired(data) if data is not None else None) or desired
        overruled = any(desired.of(kind) != count for kind, count in counts.items())
        cards = cards_in(view, target.fleet).values()
        ready = {
            kind: sum(card.role.value == kind.value and card.state == "ready" for card in cards)
            for kind in WORKERS
        }
        leaving = len(cards) - sum(ready.values())
        now = ", ".join(f"{kind} {count}/{desired.of(kind)}" for kind, count in ready.items())
        if have != (have := now + (f", {leaving} not ready or leaving" if leaving else "")):
            _progress(target, have)
        return overruled or (all(ready[kind] == desired.of(kind) for kind in WORKERS) and not leaving)

    clock = asyncio.get_running_loop().time
    until = clock() + limit_s
    while await wait_view(registry, target.fleet, settled, until - clock()) is not None:
        if overruled:
            raise Unavailable(
                f"others have changed what is wanted meanwhile: prefill={desired.prefill} "
                f"decode={desired.decode}; see `fleetctl status`"
            )
        # A worker's card comes after its process, and goes a little before it.
        if _supervised(target.state(), desired):
            return
        await asyncio.sleep(0.05)
    state = target.state()
    troubles = [
        f"{child.name}, {child.note}"
        for child in (state.children if state else ())
        if child.kind in WORKERS and child.phase is not Phase.READY
    ] or ([] if state else [_NOBODY])
    raise Unavailable(
        f"not settled after {limit_s:g} s: ready are {have or 'none'}; "
        + "".join(f"{trouble}; " for trouble in troubles[:3])
        + "see `fleetctl status` and `fleetctl logs`"
    )


def _supervised(state: FleetState | None, desired: Desired) -> bool:
    """Whether the supervisor, where there is one, has no worker but those that are wanted, and ready."""
    if state is None:
        return True
    workers = [child for child in state.children if child.kind in WORKERS]
    return all(child.phase is Phase.READY for child in workers) and all(
        sum(child.kind is kind for child in workers) == desired.of(kind) for kind in WORKERS
    )


async def _wait_decided(
    registry: Registry, fleet: str, mode: Mode, before: float, limit_s: float
) -> LastDecision:
    """Until the planner has decided in this mode."""
    from fleet.targets import decision_key, parse_decision
    from fleetctl.picture import wait_view

    found: LastDecision | None = None

    def decided(view: View) -> bool:
        nonlocal found
        data = view.values.get(decision_key(fleet))
        found = parse_decision(data) if data is not None else None
        # Another time, not a later one: clocks are set back.
        return found is not None and found.mode == mode and found.at != before

    if await wait_view(registry, fleet, decided, limit_s) is None or found is None:
        raise Unavailable(
            f"no planner has decided anything after {limit_s:g} s; see `fleetctl logs planner`, or start one "
            "(python -m planner)"
        )
    return found


def _progress(target: Target, text: str) -> None:
    if not target.as_json:
        click.echo(text, err=True)
