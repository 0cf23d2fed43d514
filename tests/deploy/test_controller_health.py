"""Whether the controller gets on, as its probes and its page of metrics say: a real process over HTTP."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import httpx
import pytest
from cluster_http import api_server

from deploy.controller.crd import definitions
from deploy.controller.figures import STUCK_S, Figures
from deploy.controller.install import installation
from deploy.controller.words import Say
from fleet.cluster import FLEETS, JSON
from fleet.telemetry import page

SPEC = {
    "image": "pdfleet:1",
    "model": {"path": "/models/m", "name": "m"},
    "control": {"etcd": "etcd:2379", "nats": "nats://nats:4222"},
}


def said(log: Path) -> re.Match[str] | None:
    return re.search(r"metrics, /live and /ready at (\S+)", log.read_text())


async def address(log: Path) -> str:
    while not (found := said(log)):
        await asyncio.sleep(0.05)
    return f"http://{found[1]}"


async def answers(client: httpx.AsyncClient, url: str, status: int) -> str:
    while True:
        answer = await client.get(url)
        if answer.status_code == status:
            return answer.text
        await asyncio.sleep(0.05)


@pytest.mark.live
def test_a_controller_says_how_it_is(tmp_path: Path) -> None:
    async def go() -> None:
        log = tmp_path / "controller.log"
        async with api_server(tmp_path) as front, httpx.AsyncClient() as client:
            for one in definitions():
                path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
                front.store.handle("POST", path, {}, one, JSON)
            body = {"metadata": {"name": "demo"}, "spec": SPEC}
            front.store.handle("POST", FLEETS.path("default"), {}, body, JSON)
            flags = (f"--kubeconfig={front.kubeconfig}", "--lease-namespace=default")
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "deploy.controller", *flags, stdout=output, stderr=output
                )
            try:
                async with asyncio.timeout(120):
                    url = await address(log)
                    assert await answers(client, f"{url}/live", 200) == "ok\n"
                    await answers(client, f"{url}/ready", 200)
                    assert (await client.get(f"{url}/else")).status_code == 404
                    while True:
                        told = (await client.get(f"{url}/metrics")).text
                        if 'pdfleet_controller_actions_total{action="apply"}' in told:
                            break
                        await asyncio.sleep(0.05)
                assert "pdfleet_controller_leads 1.0" in told
                assert "pdfleet_controller_fleets 1.0" in told
                assert 'pdfleet_controller_turns_total{result="defect"} 0.0' in told
                assert "process_resident_memory_bytes" in told
            except BaseException:
                print(log.read_text())
                raise
            finally:
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 60) == 0

    asyncio.run(go())


def test_a_turn_that_hangs_is_no_life() -> None:
    figures = Figures()
    figures.begin("default/demo", 100.0)
    assert figures.stuck(100.0 + STUCK_S) == ""
    assert "default/demo" in figures.stuck(101.0 + STUCK_S)
    figures.end("default/demo", "failed", 1.0)
    assert figures.stuck(1e9) == ""


def test_what_it_did_is_counted_by_kind() -> None:
    figures = Figures()
    figures.acted(Say("Settled", "all"))
    figures.end("a/b", "done", 0.3)
    condition = {"type": "Degraded", "status": "True"}
    told = asyncio.run(page(figures.families([{"status": {"conditions": [condition]}}, {}], 2, 1))).decode()
    for line in (
        "pdfleet_controller_fleets 2.0",
        'pdfleet_controller_conditions{condition="Degraded"} 1.0',
        'pdfleet_controller_conditions{condition="Available"} 0.0',
        "pdfleet_controller_waiting 2.0",
        "pdfleet_controller_refused 1.0",
        'pdfleet_controller_turns_total{result="done"} 1.0',
        "pdfleet_controller_turn_seconds_sum 0.3",
        'pdfleet_controller_actions_total{action="say"} 1.0',
    ):
        assert line in told


def test_the_deployment_asks_for_its_health() -> None:
    deployment = installation("pdfleet:1")[-1]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert f"--metrics.port={port['containerPort']}" in container["args"]
    for probe, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/ready")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"], "scheme": "HTTP"}
