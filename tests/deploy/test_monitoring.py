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

FOLDER = Path(__file__).parents[2] / "deploy/monitoring"
RULES = yaml.safe_load((FOLDER / "prometheus/rules.yml").read_text())
VARIABLES = {"$__rate_interval": "1m", "$slo_class": ".*", "$worker": ".*"}
OF_ANY_PROCESS = re.compile(r"up|process_\w+|python_gc_\w+")


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
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
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
    told = told_by_router() + told_by_worker()
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
    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")):
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
