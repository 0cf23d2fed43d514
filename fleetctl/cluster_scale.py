"""`fleetctl scale` of a fleet on Kubernetes: both pools in one write to its InferenceFleet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fleet.cluster import FLEETS, MERGE, Api, ClusterError, KubernetesApi, Object
from fleet.errors import BadRequest, NotFound, Unavailable
from fleetctl.options import Target, going_on

LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Wish:
    """None: stays as it is."""

    counts: dict[str, int] | None
    """None: the planner decides from now on."""
    budget: int | None = None
    advise: bool = False

    def patch(self) -> Object:
        if self.counts is None:
            plan: Object = {"mode": "advise" if self.advise else "act"}
            if self.budget is not None:
                plan["maxWorkers"] = self.budget
            return {"spec": {"planner": plan}}
        pools: Object = {role: {"replicas": count} for role, count in self.counts.items()}
        return {"spec": {**pools, "planner": {"mode": "off"}}}


def named(text: str) -> tuple[str, str]:
    """Namespace and name. BadRequest: it is neither NAMESPACE/NAME nor NAME."""
    namespace, _, name = text.rpartition("/")
    if not name or "/" in namespace:
        raise BadRequest(f"--kubernetes is {text!r}; NAMESPACE/NAME of an InferenceFleet is needed")
    return namespace or "default", name


async def scale_in_cluster(
    target: Target, fleet: str, context: str, wish: Wish, wait: bool, dry_run: bool, limit_s: float
) -> None:
    """Says what it did. NotFound, BadRequest (a rule of the fleet), Unavailable."""
    namespace, name = named(fleet)
    api = await KubernetesApi.connect(context or None, _kubeconfig())
    try:
        await _scale(target, api, namespace, name, wish, wait, dry_run, limit_s)
    finally:
        await api.close()


def _kubeconfig() -> Path | None:
    import os

    given = os.environ.get("KUBECONFIG", "")
    return Path(given) if given and os.pathsep not in given else None


async def _scale(
    target: Target, api: Api, namespace: str, name: str, wish: Wish, wait: bool, dry_run: bool, limit_s: float
) -> None:
    path = FLEETS.path(namespace, name)
    try:
        before = await api.ask("GET", path)
        query = {"dryRun": "All"} if dry_run else {}
        after = await api.ask("PATCH", path, query, wish.patch(), MERGE)
    except ClusterError as error:
        if error.missing:
            raise NotFound(f"there is no InferenceFleet {namespace}/{name}: kubectl get ifl -A") from None
        if error.refused:
            raise BadRequest(error.message) from None
        raise Unavailable(error.message) from None
    old, new = _counts(before), _counts(after)
    changes = [f"{role} {old[role]} → {new[role]}" for role in old if old[role] != new[role]]
    was, mode = (one["spec"].get("planner", {}).get("mode", "off") for one in (before, after))
    if mode != was:
        changes.append(f"planner {was} → {mode}")
    said = f"set {', '.join(changes)}" if changes else "nothing to change"
    fields: dict[str, Any] = {
        "fleet": f"{namespace}/{name}", "before": old, "desired": new, "mode": mode, "dry_run": dry_run,
    }  # fmt: skip
    if dry_run:
        target.say(f"would {said}" if changes else said, **fields)
        return
    settled = wait and wish.counts is not None
    if settled:
        with going_on(f"{said}, and that stays"):
            await _settled(target, api, path, int(after["metadata"]["generation"]), limit_s)
    target.say(f"{said}; done" if settled else said, **fields, settled=settled)


def _counts(fleet: Object) -> dict[str, int]:
    return {role: int(fleet["spec"].get(role, {}).get("replicas", 1)) for role in ("prefill", "decode")}


async def _settled(target: Target, api: Api, path: str, generation: int, limit_s: float) -> None:
    """Until the controller says of this or a later spec that nothing is on its way; says how far it is."""
    loop = asyncio.get_running_loop()
    until, told = loop.time() + limit_s, ""
    while True:
        try:
            fleet = await api.ask("GET", path)
        except ClusterError as error:
            raise Unavailable(error.message) from None
        status = fleet.get("status", {})
        found = [one for one in status.get("conditions", []) if one["type"] == "Progressing"]
        seen = int(status.get("observedGeneration", 0)) >= generation
        if seen and found and found[0]["status"] == "False":
            return
        now = found[0]["message"] if seen and found else "the controller has not seen it yet"
        if now != told and not target.as_json:
            click.echo(now, err=True)
        told = now
        if loop.time() > until:
            raise Unavailable(f"not settled after {limit_s:g} s: {now}; see `kubectl describe ifl`")
        await asyncio.sleep(LOOK_S)
