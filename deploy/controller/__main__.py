"""Starts the controller: `python -m deploy.controller --help`; `… crds` prints the definitions."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from deploy.controller.chart import chart_files
from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.crd import definitions
from deploy.controller.election import Election, ElectionSettings
from deploy.controller.looks import PageLooks
from deploy.controller.yaml_text import to_yaml
from fleet.cluster import KubernetesApi
from fleet.life import Life, run_process
from fleet.metrics import Kind, value
from fleet.metrics_server import MetricsServer, MetricsSettings
from fleet.settings import load_or_exit
from fleet.telemetry import page

log = logging.getLogger(__name__)


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
    metrics: MetricsSettings = field(default_factory=MetricsSettings)


async def run(life: Life, settings: ProcessSettings) -> None:
    """Until SIGTERM. What it left undone the next one finds."""
    api = await KubernetesApi.connect(settings.context or None, settings.kubeconfig)
    try:
        identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
        election = Election(api, settings.lease_namespace, identity, settings.election)
        controller = Controller(api, PageLooks(), settings.controller, time.time)
        loop = asyncio.get_running_loop()

        async def figures() -> bytes:
            leads = value("pdfleet_controller_leads", "Whether it acts.", Kind.GAUGE, float(election.leads))
            return await page([leads, *(controller.families() if election.leads else ())])

        def ready() -> str:
            if election.leads:
                return "" if controller.synced else "what there is has not been listed yet"
            asked = election.asked_at
            silent = asked is None or loop.time() - asked > settings.election.deadline_s
            return "the API server does not say who leads" if silent else ""

        server = await MetricsServer.start(
            figures,
            settings.metrics,
            {"/live": lambda: controller.figures.stuck(loop.time()), "/ready": ready},
        )
        log.info("metrics, /live and /ready at %s:%d", settings.metrics.bind, server.port)
        acting = asyncio.create_task(election.lead(controller.run))
        stopping = asyncio.create_task(life.stopping.wait())
        life.settled()
        await asyncio.wait((acting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if acting.done():
            acting.result()
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
        await server.close()
    finally:
        await api.close()


def files() -> dict[str, str]:
    """What is made from code, or of another file, and checked in: path in the tree → text."""
    crds = {f"deploy/crds/{one['spec']['names']['plural']}.yaml": to_yaml([one]) for one in definitions()}
    rules = Path(__file__).parents[1] / "monitoring/prometheus/rules.yml"
    chart = {**chart_files(), "rules.yml": rules.read_text()}  # Helm reads nothing beside its chart.
    return crds | {f"deploy/chart/{path}": text for path, text in chart.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["crds"]:
        print(to_yaml(definitions()), end="")
        raise SystemExit(0)
    if sys.argv[1:2] == ["files"]:
        for path, text in files().items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
        raise SystemExit(0)
    chosen = load_or_exit(ProcessSettings, prog="python -m deploy.controller")
    run_process(lambda life: run(life, chosen))
