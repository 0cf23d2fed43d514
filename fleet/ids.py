"""Identities: what a worker, one life of it, a request and a lease are called."""

from __future__ import annotations

import secrets
from typing import NewType

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker process slot, such as `decode-3f9a`. Unique in a fleet."""

Incarnation = NewType("Incarnation", str)
"""One life of a worker. A restarted process is another peer: nothing said to the old one holds."""

RequestId = NewType("RequestId", str)
"""Made by the ingress, never taken from a client."""

LeaseId = NewType("LeaseId", str)
"""A promise of a prefill worker to keep some KV blocks as they are for a while."""


def new_worker_id(role: str) -> WorkerId:
    return WorkerId(f"{role}-{secrets.token_hex(3)}")


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def new_request_id() -> RequestId:
    return RequestId(secrets.token_hex(12))


def new_lease_id() -> LeaseId:
    return LeaseId(secrets.token_hex(8))
