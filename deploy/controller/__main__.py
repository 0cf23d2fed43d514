"""Starts the controller: `python -m deploy.controller --help`; `… crds [FOLDER]` has the definitions."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.crd import definitions
from deploy.controller.election import Election, ElectionSettings
from deploy.controller.looks import PageLooks
from deploy.controller.yaml_text import to_yaml
from fleet.cluster import KubernetesApi
from fleet.life import Life, run_process
from fleet.settings import load_or_exit


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Makes a Kubernetes cluster be what its InferenceFleets say."""

    kubeconfig: Path | None = None
    """File that says where the cluster is; none: the pod's own, else KUBECONFIG or ~/.kube/config."""
    context: str = ""
    """Of the kubeconfig; empty: its current one."""
    lease_namespace: str = "pdfleet-system"
    """Where the controllers choose their leader."""
    identity: str = ""
    """Name of this one among them; empty: host and process."""
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    election: ElectionSettings = field(default_factory=ElectionSettings)


async def run(life: Life, settings: ProcessSettings) -> None:
    """Until SIGTERM. What it left undone the next one finds."""
    api = await KubernetesApi.connect(settings.context or None, settings.kubeconfig)
    try:
        identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
        election = Election(api, settings.lease_namespace, identity, settings.election)
        controller = Controller(api, PageLooks(), settings.controller, time.time)

        acting = asyncio.create_task(election.lead(controller.run))
        stopping = asyncio.create_task(life.stopping.wait())
        life.settled()
        await asyncio.wait((acting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if acting.done():
            acting.result()
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
    finally:
        await api.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["crds"]:
        for definition in definitions():
            text = to_yaml([definition])
            if sys.argv[2:]:
                Path(sys.argv[2], f"{definition['spec']['names']['plural']}.yaml").write_text(text)
            else:
                print(text, end="")
        raise SystemExit(0)
    chosen = load_or_exit(ProcessSettings, prog="python -m deploy.controller")
    run_process(lambda life: run(life, chosen))
