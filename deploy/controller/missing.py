"""Which object a pod waits for that nobody has made: by whom it is named, and what to do. Pure.

The controller may not read Secrets. What is missing is what a pod's node, or the scheduler, says of it.
"""

from __future__ import annotations

import re

from deploy.controller.render import ROLE_LABEL
from fleet.cluster import Object

_KINDS = {
    "secret": "Secret",
    "configmap": "ConfigMap",
    "config": "ConfigMap",
    "persistentvolumeclaim": "PersistentVolumeClaim",
}
_OBJECT = re.compile(r'(?i)\b(secret|configmap|persistentvolumeclaim) "([^"]+)" not found')
_KEY_OF = re.compile(r"(?i)couldn't find key (\S+) in (Secret|ConfigMap) [^/\s]+/(\S+)")
_KEY = re.compile(r'volume "([^"]+)".*references non-existent (secret|config) key: (\S+)')
_FIELDS = {
    "keys": "router.keysSecret",
    "tls": "router.tlsSecret",
    "ca": "control.caSecret",
    "fleet-tls": "control.tlsSecret",
    "model": "model.volume",
}
"""Volume of a pod → field of the fleet's spec that names what is in it."""
_HOW = {
    "Secret": "kubectl create secret generic {name} --namespace {namespace}",
    "ConfigMap": "kubectl create configmap {name} --namespace {namespace}",
    "PersistentVolumeClaim": "make it in namespace {namespace}",
}
_PARTS = {
    "Secret": ("secret", "secretName"),
    "ConfigMap": ("configMap", "name"),
    "PersistentVolumeClaim": ("persistentVolumeClaim", "claimName"),
}


def missing(pod: Object, said: str) -> str:
    """`said`: by kubelet or scheduler. Empty: it is about something else."""
    if found := _KEY_OF.search(said):
        key, kind, name = found[1], _KINDS[found[2].lower()], found[3]
        return f"{kind} {name}{_by(pod, kind, name)} has no key {key}: add it"
    if found := _KEY.search(said):
        kind, key = _KINDS[found[2]], found[3]
        name = _content(_volumes(pod).get(found[1], {}), kind)
        return f"{kind} {name}{_by(pod, kind, name)} has no key {key}: add it"
    if found := _OBJECT.search(said):
        kind, name = _KINDS[found[1].lower()], found[2]
        how = _HOW[kind].format(name=name, namespace=pod["metadata"].get("namespace", "default"))
        inside = (one.get("secret", {}) for one in _volumes(pod).values() if _content(one, kind) == name)
        keys = [f" --from-file={item['key']}" for one in inside for item in one.get("items", [])]
        return f"{kind} {name}{_by(pod, kind, name)} is not there: {how}{''.join(keys)}"
    return ""


def _by(pod: Object, kind: str, name: str) -> str:
    """The field of a fleet's spec that names it."""
    for volume, one in _volumes(pod).items():
        if _content(one, kind) == name and volume in _FIELDS:
            return f", named by spec.{_FIELDS[volume]},"
    for container in pod["spec"].get("containers", []):
        if any(name == one.get("secretRef", {}).get("name") for one in container.get("envFrom", [])):
            return ", named by spec.control.credentialsSecret,"
        sources = [way for one in container.get("env", []) for way in one.get("valueFrom", {}).values()]
        if any(name == way.get("name") for way in sources):
            return f", named by spec.{pod['metadata'].get('labels', {}).get(ROLE_LABEL, '')}.env,"
    return ""


def _volumes(pod: Object) -> dict[str, Object]:
    return {one["name"]: one for one in pod["spec"].get("volumes", [])}


def _content(volume: Object, kind: str) -> str:
    """Name of the object of that kind that a volume is made of; empty: of none."""
    part, key = _PARTS[kind]
    return str(volume.get(part, {}).get(key, ""))
