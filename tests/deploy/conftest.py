"""Fixtures of the tests of what runs on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from control_plane import ControlPlane, assets
from server_fixtures import etcd, nats

from deploy.controller.install import installation
from deploy.controller.yaml_text import to_yaml

__all__ = ["etcd", "nats"]


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real one, with what `fleetctl manifests` installs."""
    programs = assets()
    if programs is None:
        pytest.skip("KUBEBUILDER_ASSETS names no folder with kube-apiserver and kube-controller-manager")
    made = ControlPlane(programs, tmp_path_factory.mktemp("plane"))
    try:
        made.start()
        made.install(to_yaml(installation("pdfleet:1")))
        yield made
    finally:
        made.kill()
