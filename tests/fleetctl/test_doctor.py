"""What `fleetctl doctor` finds wrong, and that no secret leaves with what it packs."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from crowd import card

from fleet.member import Role
from fleetctl.__main__ import main
from fleetctl.checkup import Check, Facts, checks, secrets_of, without_secrets
from fleetctl.words import FleetPicture, RouterRow, ServerRow, WorkerRow

CARDS = (card("prefill-0", Role.PREFILL), card("decode-0", Role.DECODE))
PICTURE = FleetPicture(
    "box", "toy", tuple(WorkerRow(one.id, one.role.value, "ready") for one in CARDS),
    (RouterRow("router-0", "http://here:8000", "ready"),), None, ServerRow("here:2379", "ready"), None, None,
)  # fmt: skip
WELL = Facts(
    picture=PICTURE, cards=CARDS, etcd="here:2379", etcd_answers=True, nats="here:4222", nats_answers=True,
    versions={"fleetctl": "0.1.0", "decode-0": "0.1.0"}, unproven=frozenset(), clocks_off_s={"router-0": 0.4},
    closed=(), asked_ports=6, disk_free=50 << 30, disk=100 << 30, disk_path="/state", memory_free=8 << 30,
    memory=16 << 30,
)  # fmt: skip


def wrong(facts: Facts) -> list[Check]:
    return [check for check in checks(facts) if check.fine is False]


def test_of_a_fleet_that_is_well_everything_is() -> None:
    found = list(checks(WELL))
    assert {check.fine for check in found} == {True}
    assert not any(check.next_step for check in found)
    assert len(found) == 11


def test_the_memory_of_a_device_is_told_and_its_want_is_noticed() -> None:
    gib = 1 << 30

    def told(kv: int, **more: int) -> list[Check]:
        counters = {
            "memory_weights_bytes": 15 * gib,
            "memory_kv_bytes": kv * gib,
            "memory_graphs_bytes": 0,
            **more,
        }
        workers = (replace(PICTURE.workers[0], counters=counters), PICTURE.workers[1])
        found = checks(replace(WELL, picture=replace(PICTURE, workers=workers)))
        return [check for check in found if check.name.startswith("memory of")]

    (check,) = told(100, memory_device_bytes=141 * gib)
    assert (check.name, check.fine) == ("memory of prefill-0", True)
    assert check.said == "weights 15.0, kv 100.0 of 141.0 GiB"
    (check,) = told(125, memory_device_bytes=141 * gib)
    assert check.fine is False
    assert "engine.memory_share" in check.next_step
    assert told(2)[0].said == "weights 15.0, kv 2.0 GiB"


@pytest.mark.parametrize(
    ("facts", "name", "said"),
    [
        (replace(WELL, etcd_answers=False), "etcd", "silent"),
        (replace(WELL, nats_answers=False), "NATS", "silent"),
        (replace(WELL, picture=replace(PICTURE, routers=())), "routers", "none"),
        (replace(WELL, picture=replace(PICTURE, workers=PICTURE.workers[:1])), "workers", "no decode is"),
        (replace(WELL, unproven=frozenset({"decode-0"})), "caches", "decode-0"),
        (replace(WELL, closed=("decode-0 (sessions) at there:1",)), "ports", "there:1"),
        (replace(WELL, versions={"fleetctl": "0.2.0", "decode-0": "0.1.0"}), "versions", "0.1.0: decode-0"),
        (
            replace(WELL, cards=(CARDS[0], replace(
                CARDS[1], fingerprint=replace(CARDS[1].fingerprint, block_size=32)))),
            "fingerprints", "prefill-0 against decode-0 never exchange KV: block_size: 16 != 32",
        ),
        (replace(WELL, clocks_off_s={"router-0": -40.0}), "clocks", "-40 s"),
        (replace(WELL, disk_free=1 << 20), "disk", "0.0 of 100.0 GiB"),
        (replace(WELL, memory_free=1 << 20), "memory", "0.0 of 16.0 GiB"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_to_do_next(facts: Facts, name: str, said: str) -> None:
    (check,) = wrong(facts)
    assert check.name == name
    assert said in check.said
    assert check.next_step


def test_what_could_not_be_looked_at_is_neither_fine_nor_wrong() -> None:
    blind = replace(
        WELL, picture=None, cards=(), nats=None, nats_answers=None, unproven=None, clocks_off_s={},
        asked_ports=0, memory=None, memory_free=None,
    )  # fmt: skip
    assert wrong(blind) == []
    unknown = {check.name for check in checks(blind) if check.fine is None}
    assert unknown == {"NATS", "workers", "caches", "fingerprints", "clocks", "ports", "memory"}


PLANTED = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        "nats://fleet:hunter2@here:4222,nats://fleet:hunter2@there:4222",
        "nats://fleet:p@ss/hunter2@here:4222",
        "python -m router --api-keys acme:hunter2hunter2hunter2 --model x",
        "--control.etcd-password=hunter2",
        "--control.etcd-password -hunter2",
        "PDFLEET_HTTP_SALT_SECRET=hunter2",
        "AWS_SECRET_ACCESS_KEY=hunter2",
        '{"etcd_password": "hun\\"ter2 hunter2", "port": 1}',
        '{"api_keys": ["acme:hunter2", "b:hunter2"]}',
        "etcd_password: hunter2",
        "Authorization: Bearer hunter2hunter2",
        "authorization='Basic hunter2hunter2'",
        "https://hub/model?token=hunter2",
        "a key sk-pdfleet-hunter2hunter2 was refused",
        "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2 and cut off",
    ],
)
def test_secrets_are_taken_out_wherever_they_stand(text: str) -> None:
    assert PLANTED not in without_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt_tokens": 12, "first_token": 0.2, "key": "/fleet/box/workers/decode-0"}',
        "--engine.max-step-tokens 2048 --flow.first-token-timeout-s 30",
        "http://127.0.0.1:8000/v1",
        'pdfleet_prompt_tokens_total{model="toy"} 12',
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_values_of_the_environment_are_taken_out_as_they_are() -> None:
    known = secrets_of({"PDFLEET_API_KEYS": "acme:hunter2", "HF_TOKEN": "other-one", "HOME": "/root"})
    assert without_secrets("it said hunter2 and other-one in /root", known) == (
        "it said [removed] and [removed] in /root"
    )


def test_without_a_fleet_it_says_so_and_still_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDFLEET_CONTROL_ETCD_PASSWORD", PLANTED)
    monkeypatch.setenv("PDFLEET_CONTROL_NATS", f"nats://me:{PLANTED}@127.0.0.1:1")
    bundle = tmp_path / "report.tar.gz"
    command = ["doctor", "--state-dir", str(tmp_path / "none"), "--etcd", "127.0.0.1:1", "--json"]
    done = CliRunner().invoke(main, [*command, "--output", str(bundle)])
    assert done.exit_code == 1, done.output
    said = json.loads(done.output)
    assert {check["name"] for check in said["checks"] if check["fine"] is False} >= {"etcd", "NATS"}
    assert bundle.stat().st_mode & 0o077 == 0, "for its owner's eyes"
    with tarfile.open(bundle) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        texts = [file.read().decode() for each in packed if (file := packed.extractfile(each))]
    assert {"checks.json", "machine.json", "environment.txt", "cards.json"} <= names
    assert not any(PLANTED in text for text in [*texts, done.output])
    assert any("PDFLEET_CONTROL_NATS=nats://[removed]@127.0.0.1:1" in text for text in texts)
