"""How far a rollout is, and whether it has failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from deploy.controller.pods import Worker, seconds
from deploy.controller.render import ROLES, revision
from deploy.controller.resource import FleetSpec, FleetStatus, RolloutStatus
from deploy.controller.rollout import Step
from deploy.controller.scene import Scene, stamp
from deploy.controller.words import Judged


def progress(
    before: FleetStatus,
    scene: Scene,
    judged: Mapping[str, Judged] | None,
    target: str,
    wanted: Mapping[str, int],
    step: Step,
    spec: FleetSpec,
    routers: Sequence[Worker],
    now: float,
) -> tuple[RolloutStatus, str]:
    """How far it is, and why it has failed; empty: it has not. `routers`: those that have to be
    ready first."""
    last = before.rollout
    ready = sum(scene.ready(role, target) for role in ROLES)
    if before.update_revision != revision(spec) or not last.started:
        last = RolloutStatus(started=stamp(now), progressed=stamp(now), best_ready=ready)
    own, others = _tallies(judged or {}, target)
    if judged is not None:
        last = _begun(last, own, others)
    if step.complete or spec.rollout.paused:
        last = msgspec.structs.replace(last, progressed="", best_ready=ready)
    elif ready > last.best_ready or not last.progressed:
        last = msgspec.structs.replace(last, progressed=stamp(now), best_ready=ready)
    last = msgspec.structs.replace(last, step=step.step, steps=step.steps)
    if step.complete or spec.rollout.paused:
        return last, ""
    new = [one for one in scene.workers if one.revision == target and not one.leaving]
    new += [one for one in routers if one.created >= seconds(last.started) and not one.leaving]
    for one in new:
        if not one.ready and one.restarts >= spec.rollout.max_restarts:
            said = f": {one.trouble.message}" if one.trouble else ""
            return last, f"{one.pod} has been started {one.restarts} times again and is not ready{said}"
    rule = spec.rollout
    if judged is not None and rule.min_attainment_percent:
        own = own.since(Judged(last.attained, last.judged))
        others = others.since(Judged(last.others_attained, last.others_judged))
        least = rule.min_attainment_percent
        # What the others miss as well is not of this revision's making: too much load, as a rule.
        compared = others.judged >= rule.min_requests
        if own.judged >= rule.min_requests and not own.keeps(least) and (not compared or others.keeps(least)):
            beside = f"; without them {others.attained} of {others.judged}" if compared else ""
            return last, (
                f"{own.attained} of {own.judged} requests in which its workers had a part met their "
                f"objectives, less than {least} %{beside}"
            )
    waits = [one for one in new if not one.ready and not one.unscheduled]
    limit = rule.progress_deadline_seconds
    if waits and now - seconds(last.progressed) > limit:
        said = "; ".join(f"{one.pod}: {one.trouble.message}" if one.trouble else one.pod for one in waits[:3])
        return last, f"none of {len(waits)} new pods got ready in {limit} s: {said}"
    return last, ""


def _tallies(judged: Mapping[str, Judged], target: str) -> tuple[Judged, Judged]:
    """Of requests in which a worker of `target` had a part, and of all others."""
    own = others = Judged(0, 0)
    for names, one in judged.items():
        if target in names.split("+"):
            own += one
        else:
            others += one
    return own, others


def _begun(last: RolloutStatus, own: Judged, others: Judged) -> RolloutStatus:
    """From where it is counted. Counters fall when a router starts anew: then from there."""
    if last.judged < 0 or own.judged < last.judged or own.attained < last.attained:
        last = msgspec.structs.replace(last, attained=own.attained, judged=own.judged)
    if last.others_judged < 0 or others.judged < last.others_judged or others.attained < last.others_attained:
        last = msgspec.structs.replace(last, others_attained=others.attained, others_judged=others.judged)
    return last
