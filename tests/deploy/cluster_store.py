"""State of a Kubernetes API server, for tests: paths in, objects out; versions, watches, ownership.

Kinds are those that are registered, and those that CustomResourceDefinitions bring. What the real one does
besides (admission by others, quotas, rights) it does not.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cluster_rules import defaulted, faults, pruned, unknown, without_nulls, wrong_defaults

from fleet.cluster import APPLY, JSON, ClusterError, Object
from fleet.errors import Unavailable

STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


@dataclass
class Kind:
    api_version: str
    kind: str
    plural: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    schema: Object | None = None
    scale: Object | None = None
    status: bool = True
    generations: bool = False
    """Whether it counts how often its spec has changed."""
    columns: list[Object] = field(default_factory=list)

    @property
    def root(self) -> str:
        return f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"


BUILT_IN = [
    Kind("v1", "Namespace", "namespaces", False, ("ns",)),
    Kind("v1", "Pod", "pods", short=("po",)),
    Kind("v1", "Service", "services", short=("svc",)),
    Kind("v1", "ServiceAccount", "serviceaccounts", short=("sa",)),
    Kind("v1", "Secret", "secrets"),
    Kind("v1", "ConfigMap", "configmaps", short=("cm",)),
    Kind("v1", "Event", "events", short=("ev",)),
    Kind("apps/v1", "Deployment", "deployments", short=("deploy",), generations=True,
         scale={"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}),
    Kind("apps/v1", "StatefulSet", "statefulsets", generations=True),
    Kind("apps/v1", "ControllerRevision", "controllerrevisions"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", short=("pdb",), generations=True),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", short=("netpol",), generations=True),
    Kind("coordination.k8s.io/v1", "Lease", "leases"),
    Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", False),
    Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", False),
    Kind("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", False),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", False, ("crd",)),
]  # fmt: skip
MONITORS = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", generations=True)
GROUPS = Kind(
    "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets", generations=True,
    scale={"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"},
)  # fmt: skip

_PROPAGATION = {"Orphan": "orphan", "Foreground": "foregroundDeletion"}


@dataclass
class _Change:
    number: int
    type: str
    kind: Kind
    object: Object
    before: Object | None


class Store:
    """One cluster. `clock`: seconds since 1970."""

    def __init__(self, clock: Callable[[], float], kinds: tuple[Kind, ...] = (MONITORS, GROUPS)) -> None:
        self.clock = clock
        self.kinds = {f"{one.root}/{one.plural}": one for one in (*BUILT_IN, *kinds)}
        self.version = 1000
        self.writes: list[str] = []
        """`METHOD path` of each write that changed something, in order."""
        self._objects: dict[tuple[str, str, str], Object] = {}
        """(root/plural, namespace, name)."""
        self._gone: set[str] = set()
        """Uids of what was there."""
        self._log: list[_Change] = []
        self._oldest = self.version
        self._dry = False
        self._wakes: set[asyncio.Event] = set()
        self.cut = 0
        """Grows when all watches are broken off."""
        self.hooks: list[Callable[[str, str, Object], None]] = []
        """Called before each write, with method, path and body; may raise."""

    # ---- seen from tests

    def all(self, plural: str, namespace: str = "") -> list[Object]:
        """As they are, not to be changed: a write puts another in the place of each."""
        end = "/" + plural
        return [
            self._objects[key]
            for key in sorted(
                key
                for key in self._objects
                if key[0].endswith(end) and (not namespace or key[1] == namespace)
            )
        ]

    def one(self, plural: str, name: str, namespace: str = "default") -> Object | None:
        end = "/" + plural
        return next(
            (
                one
                for (root, space, called), one in self._objects.items()
                if called == name and root.endswith(end) and space in ("", namespace)
            ),
            None,
        )

    def compact(self) -> None:
        """No watch can go on from before now; those that stand are broken off."""
        self._log.clear()
        self._oldest = self.version
        self.break_watches()

    def break_watches(self) -> None:
        self.cut += 1
        self._wake()

    # ---- the API

    def handle(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, content: str
    ) -> Object:
        """ClusterError: refused."""
        kind, namespace, name, sub = self._where(path)
        if method == "GET":
            return self._get(kind, namespace, name, sub, query)
        self._dry = query.get("dryRun") == "All"
        for hook in self.hooks:
            hook(method, path, body or {})
        if kind.kind == "CustomResourceDefinition" and body and method in ("POST", "PATCH", "PUT"):
            self._define(body)
        if method == "POST":
            assert body is not None
            return self._create(kind, namespace, body, query)
        if method == "DELETE":
            return self._delete(kind, namespace, name, {**query, **(body or {})})
        old = self._objects.get(self._key(kind, namespace, name))
        if old is None:
            if method == "PATCH" and content == APPLY and not sub and body is not None:
                given = body.get("metadata", {})
                if given.get("name", name) != name:
                    raise ClusterError(400, "BadRequest", f"the name of the object is not {name}")
                if "uid" in given:
                    raise ClusterError(409, "Conflict", "uid mismatch: the object is not there")
                return self._create(kind, namespace, body, query, manager=query.get("fieldManager", ""))
            raise _missing(kind, name)
        assert body is not None
        if sub == "scale":
            return self._scale(kind, namespace, name, old, method, body)
        if method == "PUT":
            new = copy.deepcopy(body)
        elif content == APPLY:
            new = self._applied(kind, old, body, query.get("fieldManager", ""), query.get("force") == "true")
        elif content == JSON_PATCH:
            raise ClusterError(415, "UnsupportedMediaType", "JSON patch is not spoken here")
        else:
            new = merged(copy.deepcopy(old), body)
        return self._update(kind, namespace, name, old, new, sub, query)

    def _where(self, path: str) -> tuple[Kind, str, str, str]:
        parts = path.strip("/").split("/")
        head, rest = (parts[:2], parts[2:]) if parts[0] == "api" else (parts[:3], parts[3:])
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        root = "/" + "/".join([*head, rest[0]]) if rest else path
        kind = self.kinds.get(root)
        if kind is None:
            raise ClusterError(404, "NotFound", "the server could not find the requested resource")
        return kind, namespace, rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else ""

    @staticmethod
    def _key(kind: Kind, namespace: str, name: str) -> tuple[str, str, str]:
        return f"{kind.root}/{kind.plural}", namespace if kind.namespaced else "", name

    def _get(self, kind: Kind, namespace: str, name: str, sub: str, query: Mapping[str, str]) -> Object:
        if name:
            found = self._objects.get(self._key(kind, namespace, name))
            if found is None:
                raise _missing(kind, name)
            return self._as_scale(kind, found) if sub == "scale" else copy.deepcopy(found)
        items = [
            copy.deepcopy(one)
            for (root, space, _), one in sorted(self._objects.items())
            if root == f"{kind.root}/{kind.plural}" and namespace in ("", space) and chosen(one, query)
        ]
        version, limit = str(self.version), int(query.get("limit", 0))
        meta: Object = {"resourceVersion": version}
        if limit:
            start = 0
            if query.get("continue"):
                version, at = base64.b64decode(query["continue"]).decode().split(":")
                meta["resourceVersion"], start = version, int(at)
            if start + limit < len(items):
                meta["continue"] = base64.b64encode(f"{version}:{start + limit}".encode()).decode()
            items = items[start : start + limit]
        return {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": meta, "items": items}

    def _create(
        self, kind: Kind, namespace: str, body: Object, query: Mapping[str, str], manager: str = ""
    ) -> Object:
        new = copy.deepcopy(body)
        meta = new.setdefault("metadata", {})
        new["apiVersion"], new["kind"] = kind.api_version, kind.kind
        if kind.namespaced:
            meta["namespace"] = namespace or meta.get("namespace", "default")
        if "name" not in meta:
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        if not _NAME.fullmatch(meta["name"]) and not kind.api_version.startswith("rbac."):
            raise _invalid(kind, meta["name"], "metadata.name: Invalid value: a lowercase RFC 1123 subdomain")
        key = self._key(kind, meta.get("namespace", ""), meta["name"])
        if kind.status and kind.kind != "Pod":
            new.pop("status", None)
        new = self._admit(kind, new, None, query)
        if key in self._objects:
            raise ClusterError(409, "AlreadyExists", f'{kind.plural} "{meta["name"]}" already exists')
        meta = new["metadata"]
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.stamp()}
        if kind.generations:
            meta["generation"] = 1
        if manager:
            self._own(new, manager, set(leaves(body, kind.schema is None)))
        return self._put("ADDED", key, kind, new, None, "POST")

    def _update(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        old: Object,
        new: Object,
        sub: str,
        query: Mapping[str, str],
    ) -> Object:
        given = new.get("metadata", {})
        version = given.get("resourceVersion")
        if given.get("name", name) != name:
            raise ClusterError(400, "BadRequest", f"the name of the object ({given['name']}) is not {name}")
        if kind.schema is not None and not version:
            raise _invalid(kind, name, "metadata.resourceVersion: must be specified for an update")
        if given.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise _invalid(kind, name, "metadata.uid: field is immutable")
        if "deletionTimestamp" in old["metadata"] and not sub:
            more = {*given.get("finalizers", ())} - {*old["metadata"].get("finalizers", ())}
            if more:
                raise _invalid(
                    kind, name, f"metadata.finalizers: Forbidden: {more} while it is being deleted"
                )
        if version not in (None, "", old["metadata"]["resourceVersion"]):
            raise ClusterError(
                409, "Conflict",
                f'Operation cannot be fulfilled on {kind.plural} "{name}": the object has been modified; '
                "please apply your changes to the latest version and try again",
            )  # fmt: skip
        meta = {**new.get("metadata", {})}
        for held in ("uid", "creationTimestamp", "generation", "namespace", "name", "deletionTimestamp"):
            if held in old["metadata"]:
                meta[held] = old["metadata"][held]
        if sub == "status":
            new = {**copy.deepcopy(old), "status": new.get("status", {})}
        else:
            new = {**new, "metadata": meta, "apiVersion": kind.api_version, "kind": kind.kind}
            if kind.status and kind.kind != "Pod":
                new.pop("status", None)
                if "status" in old:
                    new["status"] = copy.deepcopy(old["status"])
        new = self._admit(kind, new, old, query)
        if kind.generations and _spec(kind, new) != _spec(kind, old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if new == old:
            return copy.deepcopy(old)
        key = self._key(kind, namespace, name)
        freed = old["metadata"].get("finalizers") and not new["metadata"].get("finalizers")
        if "deletionTimestamp" in new["metadata"] and freed:
            return self._remove(key, kind, new)
        return self._put("MODIFIED", key, kind, new, old, f"PATCH{' ' + sub if sub else ''}")

    def _admit(self, kind: Kind, new: Object, old: Object | None, query: Mapping[str, str]) -> Object:
        if kind.schema is None:
            return new
        kept = {key: new[key] for key in ("apiVersion", "kind", "metadata")}
        if query.get("fieldValidation") == "Strict":
            strange = [one for one in unknown(new, kind.schema) if not one.startswith("metadata.")]
            if strange:
                said = ", ".join(f'unknown field "{one}"' for one in strange)
                raise ClusterError(400, "BadRequest", f"strict decoding error: {said}")
        whole = defaulted(pruned(new, kind.schema), kind.schema)
        found: Object = {**without_nulls(whole, kind.schema), **kept}
        wrong = faults(found, old, kind.schema)
        if wrong:
            name = new["metadata"]["name"]
            raise ClusterError(422, "Invalid", f'{kind.kind} "{name}" is invalid: {"; ".join(wrong)}')
        return found

    def _delete(self, kind: Kind, namespace: str, name: str, options: Mapping[str, Any]) -> Object:
        key = self._key(kind, namespace, name)
        old = self._objects.get(key)
        if old is None:
            raise _missing(kind, name)
        for key_, wanted in options.get("preconditions", {}).items():
            if old["metadata"].get(key_) != wanted:
                raise ClusterError(409, "Conflict", f"precondition failed: {key_} is not {wanted}")
        grace: int = old.get("spec", {}).get("terminationGracePeriodSeconds", 30) if kind.kind == "Pod" else 0
        if options.get("gracePeriodSeconds") is not None:
            grace = int(options["gracePeriodSeconds"])
        node = old.get("spec", {}).get("nodeName")
        new = copy.deepcopy(old)
        meta = new["metadata"]
        finalizer = _PROPAGATION.get(options.get("propagationPolicy", ""))
        if finalizer and finalizer not in meta.get("finalizers", []):
            meta["finalizers"] = [*meta.get("finalizers", []), finalizer]
        if not meta.get("finalizers") and not (kind.kind == "Pod" and node and grace):
            return self._remove(key, kind, old)
        if "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = self.stamp(grace)
            meta["deletionGracePeriodSeconds"] = grace
            if kind.generations:
                meta["generation"] = meta.get("generation", 1) + 1
        if new == old:
            return copy.deepcopy(old)
        answer = self._put("MODIFIED", key, kind, new, old, "DELETE")
        self._collect(key)
        return answer

    def _collect(self, key: tuple[str, str, str]) -> None:
        """What the garbage collector does for one that waits for it, where it can by now."""
        one = self._objects.get(key)
        finalizers = one["metadata"].get("finalizers", []) if one else []
        if one is None or not {"orphan", "foregroundDeletion"} & {*finalizers}:
            return
        uid = one["metadata"]["uid"]
        for (root, namespace, name), child in list(self._objects.items()):
            owners = child["metadata"].get("ownerReferences", [])
            if uid not in [owner.get("uid") for owner in owners]:
                continue
            if "orphan" in finalizers:
                freed = copy.deepcopy(child)
                freed["metadata"]["ownerReferences"] = [one for one in owners if one.get("uid") != uid]
                place = (root, namespace, name)
                self._put("MODIFIED", place, self.kinds[root], freed, child, "PATCH")
            elif "deletionTimestamp" not in child["metadata"]:
                self._delete(self.kinds[root], namespace, name, {"propagationPolicy": "Foreground"})
        waits = "foregroundDeletion" in finalizers and any(
            owner.get("uid") == uid and owner.get("blockOwnerDeletion")
            for child in self._objects.values()
            for owner in child["metadata"].get("ownerReferences", [])
        )
        if not waits and key in self._objects:
            left = [each for each in finalizers if each not in ("orphan", "foregroundDeletion")]
            new = copy.deepcopy(self._objects[key])
            new["metadata"]["finalizers"] = left
            if left:
                self._put("MODIFIED", key, self.kinds[key[0]], new, one, "PATCH")
            else:
                self._remove(key, self.kinds[key[0]], new)

    def _remove(self, key: tuple[str, str, str], kind: Kind, old: Object) -> Object:
        gone = copy.deepcopy(old)
        del self._objects[key]
        self._record("DELETED", kind, gone, old)
        self.writes.append(f"DELETE {key[0]}/{key[2]}")
        uid = gone["metadata"]["uid"]
        self._gone.add(uid)
        for (root, namespace, name), one in list(self._objects.items()):
            owners = one["metadata"].get("ownerReferences", [])
            if any(owner.get("uid") == uid for owner in owners) and (root, namespace, name) in self._objects:
                self._delete(self.kinds[root], namespace, name, {})
        owners = {owner.get("uid") for owner in gone["metadata"].get("ownerReferences", [])}
        for place, one in list(self._objects.items()):
            if one["metadata"]["uid"] in owners:
                self._collect(place)
        return gone

    def _put(
        self, type: str, key: tuple[str, str, str], kind: Kind, new: Object, old: Object | None, how: str
    ) -> Object:
        if self._dry:
            return copy.deepcopy(new)
        self._record(type, kind, new, old)
        self._objects[key] = new
        self.writes.append(f"{how} {key[0]}/{key[2]}")
        if any(owner.get("uid") in self._gone for owner in new["metadata"].get("ownerReferences", [])):
            # Made by somebody who had not heard that its owner is gone: it is collected, too.
            self._delete(kind, key[1], key[2], {})
        return copy.deepcopy(new)

    def _record(self, type: str, kind: Kind, new: Object, old: Object | None) -> None:
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        self._log.append(_Change(self.version, type, kind, copy.deepcopy(new), old))
        self._wake()

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    # ---- scale, ownership, definitions

    def _as_scale(self, kind: Kind, one: Object) -> Object:
        if kind.scale is None:
            raise ClusterError(404, "NotFound", "the server could not find the requested resource")
        status: Object = {"replicas": at(one, kind.scale["statusReplicasPath"]) or 0}
        if "labelSelectorPath" in kind.scale:
            status |= {"selector": found} if (found := at(one, kind.scale["labelSelectorPath"])) else {}
        meta = {
            key: one["metadata"][key]
            for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        }
        return {
            "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": meta,
            "spec": {"replicas": at(one, kind.scale["specReplicasPath"]) or 0}, "status": status,
        }  # fmt: skip

    def _scale(self, kind: Kind, namespace: str, name: str, old: Object, method: str, body: Object) -> Object:
        self._as_scale(kind, old)
        new = copy.deepcopy(old)
        count = body.get("spec", {}).get("replicas", 0)
        new["spec"]["replicas"] = count
        if version := body.get("metadata", {}).get("resourceVersion"):
            new["metadata"]["resourceVersion"] = version
        return self._as_scale(kind, self._update(kind, namespace, name, old, new, "", {}))

    def _applied(self, kind: Kind, old: Object, body: Object, manager: str, force: bool) -> Object:
        """What others set stays; what this manager set before and does not any more goes."""
        keyed = kind.schema is None
        new = copy.deepcopy(old)
        owned = self._fields(old)
        mine, theirs = (
            set(leaves(body, keyed)),
            {path: who for who, paths in owned.items() if who != manager for path in paths},
        )
        both = [path for path in mine & theirs.keys() if not path[-1].startswith("k:")]
        taken = [path for path in both if at_path(old, path) != at_path(body, path)]
        if taken and not force:
            said = ", ".join(f'conflict with "{theirs[path]}": {".".join(path)}' for path in sorted(taken))
            raise ClusterError(409, "Conflict", f"Apply failed with 1 conflict: {said}")
        for path in sorted(owned.get(manager, set()) - mine, key=len):
            # An entry goes as a whole, if nobody else has set anything of it; else it keeps its keys.
            if not any(other[: len(path)] == path for other in theirs):
                drop(new, path)
                if keyed and not at_path(new, path[:-1]):
                    drop(new, path[:-1])
        new = overlaid(new, body, keyed)
        for who in list(owned):
            if who != manager:
                owned[who] -= set(taken)
        self._own(new, manager, mine, owned)
        return new

    @staticmethod
    def _fields(one: Object) -> dict[str, set[tuple[str, ...]]]:
        return {
            entry["manager"]: {tuple(json.loads(path)) for path in entry["fieldsV1"]}
            for entry in one["metadata"].get("managedFields", [])
        }

    @staticmethod
    def _own(
        new: Object,
        manager: str,
        mine: set[tuple[str, ...]],
        owned: dict[str, set[tuple[str, ...]]] | None = None,
    ) -> None:
        fields = {**(owned or {}), manager: mine}
        new["metadata"]["managedFields"] = [
            {
                "manager": who,
                "operation": "Apply",
                "apiVersion": new["apiVersion"],
                "fieldsType": "FieldsV1",
                "fieldsV1": {json.dumps(path): {} for path in sorted(paths)},
            }
            for who, paths in sorted(fields.items())
        ]

    def _define(self, body: Object) -> None:
        spec = body["spec"]
        (version,) = spec["versions"]
        if wrong := list(wrong_defaults(version["schema"]["openAPIV3Schema"])):
            raise ClusterError(422, "Invalid", f"{spec['names']['plural']} is invalid: {'; '.join(wrong)}")
        kind = Kind(
            api_version=f"{spec['group']}/{version['name']}",
            kind=spec["names"]["kind"],
            plural=spec["names"]["plural"],
            namespaced=spec["scope"] == "Namespaced",
            short=tuple(spec["names"].get("shortNames", ())),
            schema=version["schema"]["openAPIV3Schema"],
            scale=version.get("subresources", {}).get("scale"),
            generations=True,
            columns=version.get("additionalPrinterColumns", []),
        )
        self.kinds[f"{kind.root}/{kind.plural}"] = kind

    # ---- watches

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        kind, namespace, name, _ = self._where(path)
        number, cut = int(query.get("resourceVersion") or 0), self.cut
        if not number:
            for one in self._get(kind, namespace, "", "", query)["items"]:
                yield {"type": "ADDED", "object": one}
            number = self.version
            if query.get("sendInitialEvents") == "true":
                # A client that lists by watching waits for this word that all has been told.
                all_told = {"annotations": {"k8s.io/initial-events-end": "true"}}
                yield _bookmark(kind, number, all_told)
        limit = float(query.get("timeoutSeconds") or 300)
        loop = asyncio.get_running_loop()
        until = loop.time() + limit
        wake = asyncio.Event()
        self._wakes.add(wake)
        try:
            while True:
                wake.clear()
                if number < self._oldest:
                    raise ClusterError(410, "Expired", f"too old resource version: {number} ({self._oldest})")
                for change in self._since(number):
                    number = change.number
                    event = _event(change, kind, namespace, name, query)
                    if event is not None:
                        yield event
                if self.cut != cut:
                    raise Unavailable("the watch was broken off")
                try:
                    async with asyncio.timeout(max(0.0, until - loop.time())):
                        await wake.wait()
                except TimeoutError:
                    if query.get("allowWatchBookmarks") == "true":
                        yield _bookmark(kind, number, {})
                    return
        finally:
            self._wakes.discard(wake)

    def _since(self, number: int) -> list[_Change]:
        """Numbers follow each other without a gap."""
        return self._log[max(0, number - self._log[0].number + 1) :] if self._log else []

    def stamp(self, after_s: float = 0.0) -> str:
        return datetime.fromtimestamp(self.clock() + after_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _bookmark(kind: Kind, number: int, meta: Object) -> Object:
    one = {
        "kind": kind.kind,
        "apiVersion": kind.api_version,
        "metadata": {"resourceVersion": str(number), **meta},
    }
    return {"type": "BOOKMARK", "object": one}


def _event(change: _Change, kind: Kind, namespace: str, name: str, query: Mapping[str, str]) -> Object | None:
    one = change.object
    if change.kind is not kind or namespace not in ("", one["metadata"].get("namespace", "")):
        return None
    if name and one["metadata"]["name"] != name:
        return None
    now = change.type != "DELETED" and chosen(one, query)
    before = change.before is not None and chosen(change.before, query)
    if not now and not before:
        return None
    type = "DELETED" if not now else "MODIFIED" if before else "ADDED"
    return {"type": type, "object": copy.deepcopy(one)}


class StoreApi:
    """The store as `fleet.cluster.Api`, without HTTP: for virtual time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = False
        """Nothing is answered."""

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = JSON,
    ) -> Object:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("the API server is away")
        return self._store.handle(method, path, query or {}, copy.deepcopy(body), content)

    async def follow(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        if self.away:
            raise Unavailable("the API server is away")
        async for event in self._store.watch(path, query):
            yield event

    async def close(self) -> None: ...


def _missing(kind: Kind, name: str) -> ClusterError:
    group = kind.api_version.rpartition("/")[0]
    return ClusterError(404, "NotFound", f'{kind.plural}{"." + group if group else ""} "{name}" not found')


def _invalid(kind: Kind, name: str, said: str) -> ClusterError:
    return ClusterError(422, "Invalid", f'{kind.kind} "{name}" is invalid: {said}')


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


def _spec(kind: Kind, one: Object) -> Object:
    ignored = ("metadata", "status", "apiVersion", "kind")
    return {key: value for key, value in one.items() if key not in ignored}


def chosen(one: Object, query: Mapping[str, str]) -> bool:
    own = one["metadata"].get("labels", {})
    for part in filter(None, query.get("labelSelector", "").split(",")):
        key, equal, value = part.replace("==", "=").partition("=")
        if key not in own or (equal and own[key] != value):
            return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = part.replace("==", "=").partition("=")
        if str(at(one, f".{key}") or "") != value:
            return False
    return True


def at(one: Any, path: str) -> Any:
    """By a dotted path with a leading dot."""
    for part in path.strip(".").split("."):
        one = one.get(part) if isinstance(one, dict) else None
    return one


_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",), "initContainers": ("name",), "env": ("name",), "volumes": ("name",),
    "volumeMounts": ("mountPath",), "imagePullSecrets": ("name",), "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}  # fmt: skip
"""Lists of Kubernetes' own kinds whose entries are fields of their own, by what tells them apart."""


def entry_keys(name: str, entries: Any) -> tuple[str, ...] | None:
    """None: the list is one field."""
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        return None
    if name == "ports":
        # Those of a NetworkPolicy are one field, and have names.
        first = next((key for key in ("containerPort", "port") if entries and key in entries[0]), "port")
        return (first, "protocol") if not entries or isinstance(entries[0].get(first), int) else None
    return _KEYS.get(name)


def entry(one: Object, keys: tuple[str, ...]) -> str:
    return "k:" + json.dumps({key: one.get(key) for key in keys}, sort_keys=True)


def step_into(one: Any, part: str) -> Any:
    if isinstance(one, dict):
        return one.get(part)
    if isinstance(one, list) and part.startswith("k:"):
        wanted = json.loads(part[2:])
        return next((each for each in one if all(each.get(k) == v for k, v in wanted.items())), None)
    return None


def at_path(one: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        one = step_into(one, part)
    return one


def leaves(body: Object, keyed: bool, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of what a manager sets. `keyed`: entries of some lists are fields of their own, as of Kubernetes'
    own kinds; other lists are one."""
    for key, value in body.items():
        if not path and key in ("apiVersion", "kind"):
            continue
        here = (*path, key)
        if here in (("metadata", "name"), ("metadata", "namespace"), ("metadata", "resourceVersion")):
            continue
        keys = entry_keys(key, value) if keyed else None
        if keys is not None:
            for one in value:
                yield (*here, entry(one, keys))
                yield from leaves(one, keyed, (*here, entry(one, keys)))
        elif isinstance(value, dict) and value:
            yield from leaves(value, keyed, here)
        else:
            yield here


def drop(one: Object, path: tuple[str, ...]) -> None:
    holder, part = at_path(one, path[:-1]), path[-1]
    if len(path) > 1 and path[-2].startswith("k:") and part in json.loads(path[-2][2:]):
        return
    if isinstance(holder, dict):
        holder.pop(part, None)
    elif isinstance(holder, list) and (found := step_into(holder, part)) is not None:
        holder.remove(found)


def overlaid(old: Object, new: Object, keyed: bool) -> Object:
    for key, value in new.items():
        keys = entry_keys(key, value) if keyed else None
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            overlaid(old[key], value, keyed)
        elif keys and isinstance(old.get(key), list):
            for one in value:
                held = step_into(old[key], entry(one, keys))
                if held is None:
                    old[key].append(copy.deepcopy(one))
                else:
                    overlaid(held, one, keyed)
        else:
            old[key] = copy.deepcopy(value)
    return old


def merged(old: Object, patch: Object) -> Object:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            old.pop(key, None)
        elif isinstance(value, dict):
            held = old.get(key)
            old[key] = merged(held if isinstance(held, dict) else {}, value)
        else:
            old[key] = copy.deepcopy(value)
    return old
