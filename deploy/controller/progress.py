"""How far a rollout is, and whether it has failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from deploy.controller.pods import seconds
from deploy.controller.render import ROLES, revision
from deploy.controller.resource import FleetSpec, FleetStatus, RolloutStatus
from deploy.controller.rollout import Step
from deploy.controller.scene import Scene, stamp
from deploy.controller.words import Judged


def progress(
    before: FleetStatus,
    scene: Scene,
    judged: Judged | None,
    target: str,
    wanted: Mapping[str, int],
    step: Step,
    spec: FleetSpec,
    now: float,
) -> tuple[RolloutStatus, str]:
    """How far it is, and why it has failed; empty: it has not."""
    last = before.rollout
    ready = sum(scene.ready(role, target) for role in ROLES)
    if before.update_revision != revision(spec) or not last.started:
        last = RolloutStatus(
            started=stamp(now), progressed=stamp(now), best_ready=ready,
            attained=judged.attained if judged else -1, judged=judged.judged if judged else -1,
        )  # fmt: skip
    elif last.judged < 0 and judged is not None:
        last = msgspec.structs.replace(last, attained=judged.attained, judged=judged.judged)
    if step.complete or spec.rollout.paused:
        last = msgspec.structs.replace(last, progressed="", best_ready=ready)
    elif ready > last.best_ready or not last.progressed:
        last = msgspec.structs.replace(last, progressed=stamp(now), best_ready=ready)
    last = msgspec.structs.replace(last, step=step.step, steps=step.steps)
    if step.complete or spec.rollout.paused:
        return last, ""
    new = [one for one in scene.workers if one.revision == target and not one.leaving]
    for one in new:
        if not one.ready and one.restarts >= spec.rollout.max_restarts:
            said = f": {one.trouble.message}" if one.trouble else ""
            return last, f"{one.pod} has been started {one.restarts} times again and is not ready{said}"
    rule = spec.rollout
    if judged is not None and last.judged >= 0 and rule.min_attainment_percent:
        # Counters fall when a router starts anew: then there is nothing to compare with.
        of, attained = judged.judged - last.judged, judged.attained - last.attained
        if of >= rule.min_requests and attained >= 0 and attained * 100 < of * rule.min_attainment_percent:
            return last, (
                f"{attained} of {of} requests since it began met their objectives, "
                f"less than {rule.min_attainment_percent} %"
            )
    waits = [one for one in new if not one.ready and not one.unscheduled]
    limit = rule.progress_deadline_seconds
    if waits and now - seconds(last.progressed) > limit:
        said = "; ".join(f"{one.pod}: {one.trouble.message}" for one in waits[:3] if one.trouble)
        return (
            last,
            f"none of {len(waits)} new workers got ready in {limit} s{': ' + said if said else ''}",
        )
    return last, ""
