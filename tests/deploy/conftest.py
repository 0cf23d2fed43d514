"""Fixtures of the tests of what runs on Kubernetes."""

from __future__ import annotations

from server_fixtures import etcd, nats

__all__ = ["etcd", "nats"]
