"""Dashboards, rules and alerts: every expression parses, and names only what a fleet tells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql_parser import VectorSelector, parse, walk  # type: ignore[import-not-found]
from told import told_by_router, told_by_worker

from deploy.controller.figures import Figures
from fleet.metrics import Kind, value

FOLDER = Path(__file__).parents[2] / "deploy/monitoring"
RULES = yaml.safe_load((FOLDER / "prometheus/rules.yml").read_text())
VARIABLES = {"$__rate_interval": "1m", "$slo_class": ".*", "$worker": ".*"}
OF_ANY_PROCESS = re.compile(r"up|scrape_series_added|process_\w+|python_gc_\w+")


def rules() -> Iterator[dict[str, Any]]:
    for group in RULES["groups"]:
        yield from group["rules"]


def panels() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel of every committed dashboard."""
    for path in sorted((FOLDER / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"]


def filled(expression: str) -> str:
    for name, chosen in VARIABLES.items():
        expression = expression.replace(name, chosen)
    assert "$" not in expression, expression
    return expression


EXPRESSIONS = [*panels(), *((rule.get("record") or rule["alert"], rule["expr"]) for rule in rules())]


def test_the_dashboards_are_those_that_the_panels_make() -> None:
    made = subprocess.run(
        [sys.executable, FOLDER / "build.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert len(list((FOLDER / "dashboards").glob("*.json"))) == 5


def test_every_expression_parses_and_names_what_is_told() -> None:
    leads = value("pdfleet_controller_leads", "As its __main__ tells it.", Kind.GAUGE, 1.0)
    told = [*told_by_router(), *told_by_worker(), leads, *Figures().families([], 0, 0)]
    names = {
        f"{family.name}{ending}"
        for family in told
        for ending in {"counter": ("_total",), "gauge": ("",)}.get(family.kind, ("_bucket", "_sum", "_count"))
    }
    names |= {rule["record"] for rule in rules() if "record" in rule}
    labels = {family.name: set(family.labels) for family in told}
    assert len(EXPRESSIONS) > 60
    for where, expression in EXPRESSIONS:
        found: list[Any] = []

        def look(node: Any, found: list[Any] = found) -> bool:
            found.append(node)
            return True

        walk(parse(filled(expression)), look)
        selectors = [node for node in found if isinstance(node, VectorSelector)]
        assert selectors, f"{where}: {expression}"
        for selector in selectors:
            name = selector.name
            assert name in names or OF_ANY_PROCESS.fullmatch(name), (
                f"{where} reads {name}, which nobody tells"
            )
            family = re.sub(r"_(total|bucket|sum|count)$", "", name)
            own = labels.get(name) or labels.get(family)
            for matcher in selector.matchers.matchers:
                # Those of a scraped worker come with its target.
                assert own is None or matcher.name in own | {"worker", "role"}, f"{where}: {matcher.name}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (make prometheus)")
def test_rules_and_alerts_do_what_they_say() -> None:
    for command in (
        ("check", "config", "prometheus.yml", "containers.yml"),
        ("test", "rules", "rules_test.yml"),
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=FOLDER / "prometheus", capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (FOLDER / "prometheus/rules_test.yml").read_text()
    for rule in rules():
        assert "alert" not in rule or f"alertname: {rule['alert']}" in tested, (
            f"{rule['alert']} is not tested"
        )


def test_what_is_mounted_is_there() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert re.fullmatch(r".+:v?\d+\.\d+\.\d+", service["image"]), "a version is pinned"
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).is_dir(), source
    source = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text())
    scrape = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["datasources"][0]["jsonData"]["timeInterval"] == scrape


def inside(service: dict[str, Any], path: str) -> Path | None:
    """The file or folder of the tree that a service sees there."""
    for volume in service["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("./") and Path(path).is_relative_to(target):
            return FOLDER / source / Path(path).relative_to(target)
    return None


def test_what_the_services_are_told_to_read_is_where_it_is_mounted() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    prometheus, grafana = compose["services"]["prometheus"], compose["services"]["grafana"]
    told = dict(one.removeprefix("--").split("=", 1) for one in prometheus["command"])
    assert "prometheus:" + told["storage.tsdb.path"] in prometheus["volumes"], "what it knows is kept"
    config = inside(prometheus, told["config.file"])
    assert config is not None
    settings = yaml.safe_load(config.read_text())
    assert all((config.parent / name).is_file() for name in settings["rule_files"])
    # Grafana looks for its providers there unless told otherwise.
    provisioning = inside(grafana, "/etc/grafana/provisioning")
    assert provisioning is not None
    assert {one.name for one in provisioning.iterdir()} <= {
        "dashboards",
        "datasources",
        "plugins",
        "alerting",
    }
    for path in provisioning.rglob("*.yml"):
        for provider in yaml.safe_load(path.read_text()).get("providers", ()):
            shown = inside(grafana, provider["options"]["path"])
            assert shown is not None, f"{path.name}: {provider['options']['path']} is not mounted"
            assert list(shown.glob("*.json")), f"{path.name} provides no dashboard"
    assert {service["network_mode"] for service in (prometheus, grafana)} == {"host"}


def test_grafana_asks_the_prometheus_that_is_brought_up_and_both_bind_loopback() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    prometheus, grafana = compose["services"]["prometheus"], compose["services"]["grafana"]
    told = dict(one.removeprefix("--").split("=", 1) for one in prometheus["command"])
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == f"http://{told['web.listen-address']}"
    assert told["web.listen-address"].startswith("127.0.0.1:")
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    # Dashboards take a source of this kind by a variable, or this one by its name.
    for path in (FOLDER / "dashboards").glob("*.json"):
        made = json.loads(path.read_text())
        variables = {one["name"]: one for one in made["templating"]["list"]}
        for panel in made["panels"]:
            for asked in (panel, *panel.get("targets", ())):
                uid = asked.get("datasource", {}).get("uid", source["uid"])
                assert uid in (source["uid"], "${datasource}"), f"{path.name}: {panel['title']} asks {uid}"
        assert variables["datasource"]["query"] == source["type"], path.name
    uids = [json.loads(path.read_text())["uid"] for path in (FOLDER / "dashboards").glob("*.json")]
    assert len(set(uids)) == len(uids) == 5
