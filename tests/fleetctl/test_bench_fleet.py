"""`fleetctl bench` against a real fleet of latency workers: what it counts is what the router counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.live


@dataclass(frozen=True)
class Fleet:
    url: str
    state: Path

    def run(self, *arguments: str) -> dict[str, Any]:
        """The object that `fleetctl ARGUMENTS --json` prints."""
        command = [sys.executable, "-m", "fleetctl", *arguments, "--json", "--state-dir", str(self.state)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def counters(self) -> Counter[str]:
        """Of the router: each over all of its labels, and `NAME/CLASS`."""
        page = httpx.get(self.url.removesuffix("/v1") + "/metrics").text
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.endswith(("_total", "_count")):
                    found[sample.name] += int(sample.value)
                    found[f"{sample.name}/{sample.labels.get('slo_class')}"] += int(sample.value)
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    state = tmp_path_factory.mktemp("bench")
    starting = Fleet("", state)
    memory = f"engine.kv-memory-bytes={4096 * 128}"
    up = ("up", "--detach", "--port", "0", "--model", "latency", "--prefill", "1", "--decode", "1")
    ready = starting.run(*up, "--set", memory)
    try:
        yield Fleet(ready["url"], state)
    finally:
        starting.run("down")


def test_counts_are_those_of_the_router(fleet: Fleet, tmp_path: Path) -> None:
    before = fleet.counters()
    said = fleet.run(
        *("bench", "--rate", "30", "--requests", "60", "--output", "4..12", "--prompt", "20..80"),
        *("--turns", "1..2", "--think", "0.05", "--prefix-tokens", "32", "--seed", "3"),
        *("--kind", "class=interactive share=2", "--kind", "class=batch", "--slo", "ttft=60000"),
        *("--html", str(tmp_path / "report.html"), "--records", str(tmp_path / "records.jsonl")),
    )
    rise = fleet.counters()
    rise.subtract(before)
    sent = said["requests"]["sent"]
    assert 60 <= sent == said["requests"]["judged"] <= 120
    assert said["requests"]["ends"] == {"finished": sent}
    assert (said["all"]["attained"], said["all"]["missed"], said["errors"]) == (sent, 0, {})
    assert set(said["classes"]) == {"interactive", "batch"}
    assert sum(row["attained"] for row in said["classes"].values()) == sent
    # Two requests to find out what the server knows, whose prompts and answers are not counted here.
    assert said["server"]["probes"] == 2
    firsts = "pdfleet_time_to_first_token_seconds_count"
    assert rise["pdfleet_http_requests_total"] == rise[firsts] == sent + 2
    for name, row in said["classes"].items():
        assert rise[f"{firsts}/{name}"] == row["attained"]
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(records) == sent
    assert {one["output_tokens"] == one["wanted_tokens"] == one["tokens"] for one in records} == {True}
    assert rise["pdfleet_generation_tokens_total"] == said["tokens"]["output"]["total"] + 4
    probes = rise["pdfleet_prompt_tokens_total"] - said["tokens"]["prompt"]["total"]
    assert 144 < probes < 2000
    # Its tokens are bytes: a word is several, and prompts are still as long as they are to be.
    assert said["server"]["tokens_per_word"] > 4
    assert said["tokens"]["prompt"]["p50"] == pytest.approx(said["tokens"]["asked"]["p50"], rel=0.5)
    cached = sum(one.get("cached_tokens", 0) for one in records)
    # What the probes share is the chat template.
    assert cached > 0
    assert 0 <= rise["pdfleet_cached_tokens_total"] - cached < 136
    assert all(one["request_id"] for one in records)
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_completions_and_a_trace(fleet: Fleet, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [1, 2, at]} for at in range(9)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = fleet.run(
        *("bench", "--api", "completions", "--trace", str(trace), "--speed", "10", "--length-scale", "0.1"),
        *("--output-limit", "3", "--slo", "ttft=60000"),
    )
    assert said["requests"]["ends"] == {"finished": 9}
    assert said["tokens"]["output"]["total"] == 27
    assert said["tokens"]["asked"]["p50"] == 110
    assert said["tokens"]["cached_share"] > 0.3


def test_the_highest_rate_is_found(fleet: Fleet, tmp_path: Path) -> None:
    """Nothing attains a time to the first token of a microsecond, and everything one of ten minutes."""
    shape = ("--prompt", "20", "--output", "2", "--duration", "2", "--runs", "1", "--pause", "0")
    none = fleet.run("bench", "find", *shape, "--start", "20", "--slo", "ttft=0.001")
    assert "rate" not in none["found"]
    assert "fails" in none["found"]["why"]
    page = tmp_path / "find.html"
    limits = ("--slo", "ttft=600000", "--lag-limit", "60000")
    all_of_them = fleet.run(
        "bench", "find", *shape, "--start", "20", "--most", "40", *limits, "--html", str(page)
    )
    assert all_of_them["found"]["rate"] == 40
    assert [run["rate"] for run in all_of_them["runs"]] == [20, 40]
    assert "<svg" in page.read_text()
