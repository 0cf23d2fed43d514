"""The CustomResourceDefinitions, made from the classes of `resource.py`. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from deploy.controller.resource import (
    FleetPoolSpec,
    FleetPoolStatus,
    FleetSpec,
    FleetStatus,
)
from fleet.cluster import FLEETS, GROUP, POOLS, VERSION, Object, Resource

RESERVED = (
    *("model", "served-model-name", "worker-id", "router-id", "port", "session-port", "api-keys"),
    *(
        "chassis.drain-limit-s",
        "chassis.revision",
        "metrics.bind",
        "metrics.port",
        "transfer.advertise",
        "transfer.bind",
    ),
    *("http.port", "http.keys-file", "http.tls-cert", "http.tls-key", "http.drain-limit-s", "config"),
)
"""Settings that the controller gives itself: docs/kubernetes.md."""

_MAP_LIMIT = 200
"""Entries of a map that a rule looks at: the API server reckons with the most there can be."""


def _rule(path: str, rule: str, message: str) -> dict[str, str]:
    return {"rule": rule, "message": message, "fieldPath": path}


_GPUS = " + ".join(
    f"self.{pool}.replicas * self.{pool}.nodes * self.{pool}.gpus" for pool in ("prefill", "decode")
)
_OWN = ", ".join(f"'{name}'" for name in RESERVED)
_SETTINGS = [
    _rule(
        ".settings",
        f"self.settings.all(name, !(name in [{_OWN}]) && !name.startsWith('control.'))",
        "settings of names, addresses, ports, TLS and drain are given by the controller: "
        "use the fields of spec for them",
    ),
]
RULES: dict[str, list[dict[str, str]]] = {
    "Control": [
        _rule(
            ".tlsName",
            "self.tlsName == '' || self.tlsSecret != ''",
            "tlsName is what the certificate in tlsSecret bears: without one there is none",
        ),
    ],
    "Pool": [
        _rule(
            ".replicas",
            "self.replicas <= self.maxReplicas",
            "replicas must not be above maxReplicas",
        ),
        _rule(
            ".replicas",
            "self.replicas >= self.minReplicas",
            "replicas must not be below minReplicas",
        ),
        *_SETTINGS,
    ],
    "Routers": _SETTINGS,
    "Planning": [
        _rule(
            ".settings",
            "self.settings.all(name, name.startsWith('planner.') && name != 'planner.budget')",
            "settings are those that begin with planner.; the budget is maxWorkers",
        )
    ],
    "Rollout": [
        _rule(
            ".maxSurgePercent",
            "self.maxSurgePercent > 0 || self.maxUnavailablePercent > 0",
            "maxSurgePercent and maxUnavailablePercent must not both be 0: nothing could ever change",
        )
    ],
    "FleetSpec": [
        _rule(
            ".budget.gpus",
            f"!has(self.budget.gpus) || {_GPUS} <= self.budget.gpus",
            "prefill and decode together want more GPUs (replicas x nodes x gpus) than budget.gpus",
        ),
    ],
    "FleetPoolSpec": [
        _rule(".fleet", "self.fleet == oldSelf.fleet", "fleet cannot be changed"),
        _rule(".pool", "self.pool == oldSelf.pool", "pool cannot be changed"),
    ],
}
"""Validation rules (CEL) by class; each names its field."""

_NAME_RULE = {
    "rule": "self.metadata.name.matches('^[a-z]([a-z0-9-]*[a-z0-9])?$') && self.metadata.name.size() <= 40",
    "message": "metadata.name must be a DNS label of at most 40 characters that begins with a letter: "
    "names of Services and pods are made of it",
}


_GROUP_RULE = {
    "rule": "self.metadata.name.size() <= 28 || self.spec.prefill.nodes + self.spec.decode.nodes == 2",
    "message": "metadata.name must be of at most 28 characters where a pool has nodes above 1: names of "
    "StatefulSets are made of it, which may have 52",
}
_HANDLE_RULE = {
    "rule": "self.metadata.name == self.spec.fleet + '-' + self.spec.pool",
    "message": "metadata.name must be FLEET-POOL: the controller makes these, and looks at no others",
}


def schema(spec: type[Any], status: type[Any], rules: list[Object]) -> Object:
    """Structural schema of an object with these two parts, and rules of the whole."""
    (spec_ref, status_ref), components = msgspec.json.schema_components((spec, status), ref_template="{name}")
    found: Object = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _structural(spec_ref, components),
            "status": _structural(status_ref, components, defaults=False),
        },
    }
    found["x-kubernetes-validations"] = rules
    return found


def _structural(node: Object, components: Object, defaults: bool = True) -> Object:
    """Without references, and with what Kubernetes adds to a schema."""
    if "$ref" in node:
        name = node["$ref"]
        inner = _structural(components[name], components, defaults)
        if name in RULES and defaults:
            inner["x-kubernetes-validations"] = RULES[name]
        for key in ("description",):
            if key in node:
                inner[key] = node[key]
        if "default" in node and defaults:
            # Whole: the API server holds rules against it as it stands, before parts of it are filled in.
            inner["default"] = {
                name: part["default"] for name, part in inner["properties"].items() if "default" in part
            }
        return inner
    if "anyOf" in node:
        (kind,) = (one for one in node["anyOf"] if one.get("type") != "null")
        # Not nullable: a field that is not there is left out, and rules ask with `has`.
        found = _structural(kind, components, defaults)
        if "description" in node:
            found["description"] = node["description"]
        return found
    found = {key: value for key, value in node.items() if key not in ("title", "propertyNames", "default")}
    if isinstance(found.get("type"), list):
        found["type"] = next(kind for kind in found["type"] if kind != "null")
    if "default" in node and defaults and node["default"] is not None:
        found["default"] = node["default"]
    if "enum" in found:
        found.setdefault("type", "string")
    if found.get("type") == "integer":
        found["format"] = "int64"
    if found.get("type") == "array":
        found["items"] = _structural(node["items"], components, defaults)
        if "type" in found["items"].get("properties", {}):
            found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        else:
            found["x-kubernetes-list-type"] = "atomic"
    if found.get("type") == "object":
        if "properties" in found:
            found["properties"] = {
                name: _structural(each, components, defaults) for name, each in node["properties"].items()
            }
        elif isinstance(node.get("additionalProperties"), dict):
            found["additionalProperties"] = _structural(node["additionalProperties"], components, defaults)
            found["maxProperties"] = _MAP_LIMIT
        else:
            found["x-kubernetes-preserve-unknown-fields"] = True
    if not node.get("required"):
        found.pop("required", None)
    return found


def _definition(
    resource: Resource,
    short: list[str],
    body: Object,
    columns: list[tuple[str, str, str]],
    scale: bool,
) -> Object:
    singular = resource.kind.lower()
    subresources: Object = {"status": {}}
    if scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": singular,
                "shortNames": short,
                "categories": ["pdfleet"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": body},
                    "subresources": subresources,
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path} for name, kind, path in columns
                    ],
                }
            ],
        },
    }


def definitions() -> list[Object]:
    """Both, in the order in which they are to be applied."""
    condition = ".status.conditions[?(@.type=='{}')].status".format
    return [
        _definition(
            FLEETS,
            ["ifl"],
            schema(FleetSpec, FleetStatus, [_NAME_RULE, _GROUP_RULE]),
            [
                ("Model", "string", ".spec.model.name"),
                ("Prefill", "integer", ".spec.prefill.replicas"),
                ("P-Ready", "integer", ".status.prefill.ready"),
                ("Decode", "integer", ".spec.decode.replicas"),
                ("D-Ready", "integer", ".status.decode.ready"),
                ("Available", "string", condition("Available")),
                ("Progressing", "string", condition("Progressing")),
                ("Degraded", "string", condition("Degraded")),
                ("Revision", "string", ".status.revision"),
                ("Age", "date", ".metadata.creationTimestamp"),
            ],
            scale=False,
        ),
        _definition(
            POOLS,
            ["fpool"],
            schema(FleetPoolSpec, FleetPoolStatus, [_HANDLE_RULE]),
            [
                ("Fleet", "string", ".spec.fleet"),
                ("Pool", "string", ".spec.pool"),
                ("Wanted", "integer", ".spec.replicas"),
                ("Replicas", "integer", ".status.replicas"),
                ("Ready", "integer", ".status.readyReplicas"),
                ("Age", "date", ".metadata.creationTimestamp"),
            ],
            scale=True,
        ),
    ]


def read_spec(fleet: Object) -> FleetSpec:
    """ValueError names the field and what is wrong with it."""
    try:
        return msgspec.convert(fleet.get("spec", {}), FleetSpec)
    except msgspec.ValidationError as error:
        text = str(error)
        at = re.search(r"at `\$(.*)`", text)
        where = f"spec{at[1]}" if at else "spec"
        raise ValueError(f"{where}: {re.sub(r' - at .*', '', text)}") from None


def read_status(fleet: Object) -> FleetStatus:
    """Of a fleet without a status, or with one that says other things: an empty one."""
    try:
        return msgspec.convert(fleet.get("status", {}), FleetStatus)
    except msgspec.ValidationError:
        return FleetStatus()
