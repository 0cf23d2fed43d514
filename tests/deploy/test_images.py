"""The image and the compose files against the tree and the settings; `deploy/images/check.sh` runs them."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from decode_worker.settings import DecodeWorkerSettings
from fleet.chassis import ChassisSettings
from fleet.settings import load
from prefill_worker.settings import PrefillWorkerSettings
from router.__main__ import RouterProcessSettings

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
SETTINGS: dict[str, Any] = {
    "router": RouterProcessSettings,
    "prefill_worker": PrefillWorkerSettings,
    "decode_worker": DecodeWorkerSettings,
}


@dataclass(frozen=True)
class Stage:
    base: str
    name: str
    steps: list[tuple[str, str]]
    """(instruction, the rest of it on one line)"""

    def of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]

    def only(self, instruction: str) -> str:
        (found,) = self.of(instruction)
        return found

    def copied(self) -> list[str]:
        """What it takes from the tree."""
        words = [rest.split() for rest in self.of("COPY") if not rest.startswith("--from")]
        return [source for sources in words for source in sources[:-1]]


def stages() -> list[Stage]:
    lines = [line for line in (IMAGES / "Dockerfile").read_text().splitlines() if line[:1] not in ("#", "")]
    found: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name, []))
        elif found:
            found[-1].steps.append((instruction, rest.strip()))
    return found


DEPENDENCIES, BUILD, FINAL = stages()


def compose(file: Path) -> dict[str, Any]:
    """With each variable at its default."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", file.read_text())
    read: dict[str, Any] = yaml.safe_load(text)
    return read


FLEET = compose(IMAGES / "compose.yaml")["services"]
OURS = {name: service for name, service in FLEET.items() if service["image"].startswith("pdfleet:")}


def chosen(name: str) -> Any:
    """The settings that a service of ours comes to."""
    program, dash_m, module, *flags = OURS[name]["command"]
    assert (program, dash_m) == ("python", "-m")
    return load(SETTINGS[module], flags, {})


def minutes_and_seconds(text: str) -> float:
    return sum(float(n) * {"m": 60, "s": 1}[unit] for n, unit in re.findall(r"(\d+)([ms])", text))


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (IMAGES / "Dockerfile.dockerignore").read_text().split()
    copied = [*DEPENDENCIES.copied(), *BUILD.copied()]
    for source in copied:
        assert (ROOT / source).exists(), source
        for pattern in ignored:
            assert not fnmatch.fnmatch(source, pattern), f"{source} is copied, and ignored by {pattern}"
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {f"{room} {room}" for room in packages} <= set(BUILD.of("COPY"))
    # What nobody wants in an image, and what is secret or large in a tree that is worked in.
    assert {".git", ".venv", "tests", "**/__pycache__"} <= set(ignored)
    assert not FINAL.copied(), "only what was built is in the image"


def test_a_change_of_code_leaves_the_layer_of_dependencies_as_it_is() -> None:
    assert DEPENDENCIES.copied() == ["pyproject.toml", "constraints.txt"]
    install = next(rest for rest in DEPENDENCIES.of("RUN") if "pip install" in rest)
    assert "-c constraints.txt" in install
    assert BUILD.base == DEPENDENCIES.name == "dependencies"
    assert "--no-deps --prefix /release" in BUILD.only("RUN")
    # Over it, last, and in a way that a builder's cache sees: podman's takes no notice of what a mount holds.
    assert FINAL.of("COPY") == [
        "--from=dependencies /opt/pdfleet /opt/pdfleet",
        "--from=build /release /opt/pdfleet",
    ]
    assert not [rest for stage in stages() for rest in stage.of("RUN") if "--mount" in rest]


def test_all_that_an_image_installs_is_pinned() -> None:
    """Whatever pdfleet needs, and what that needs: another day's build is of the same versions."""
    text = (ROOT / "constraints.txt").read_text()
    pinned = {canonicalize_name(line.partition("==")[0]): line for line in text.split()}
    environments = [{"extra": extra} for extra in ("", "cuda", "tracing")]
    found: set[str] = set()
    new = {"pdfleet"}
    while new:
        found |= new
        needs: set[str] = set()
        for name in new:
            for line in distribution(name).requires or []:
                need = Requirement(line)
                extras = environments if name == "pdfleet" else [{"extra": ""}]
                if need.marker is None or any(need.marker.evaluate(one) for one in extras):
                    needs.add(canonicalize_name(need.name))
        new = needs - found
    assert len(found) > 60
    assert not {name for name in found - {"pdfleet"} if name not in pinned}
    for name in found - {"pdfleet"}:
        version = distribution(name).version.partition("+")[0]
        assert pinned[name].endswith(f"=={version}"), f"{version} is installed, not {pinned[name]}"


def test_a_process_is_nobody_and_hears_sigterm_from_its_first_moment() -> None:
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", FINAL.only("USER")), (
        "by number: Kubernetes asks for runAsNonRoot"
    )
    user = FINAL.only("USER").partition(":")[0]
    installed = next(rest for rest in FINAL.of("RUN") if "apt-get" in rest)
    assert f"--uid {user}" in installed
    assert "rm -rf /var/lib/apt/lists/*" in installed
    # Kernels of the CPU, and Triton's launchers, are compiled where they run; HOME is where they lie.
    assert {"gcc", "libc6-dev", "tini"} <= set(installed.split())
    (environment,) = (shlex.split(rest) for rest in FINAL.of("ENV"))
    assert "HOME=/tmp" in environment
    assert FINAL.only("WORKDIR") == "/tmp"
    assert json.loads(FINAL.only("ENTRYPOINT")) == ["tini", "--"]
    assert isinstance(json.loads(FINAL.only("CMD")), list), "no shell in between"
    # A volume of Docker's own is whose its folder is in the image; one of the host's is root's.
    assert "install -d -o pdfleet -g pdfleet /models" in installed


def test_there_is_one_version() -> None:
    label = dict(word.split("=", 1) for word in shlex.split(FINAL.only("LABEL")))
    assert label["org.opencontainers.image.version"] == VERSION
    assert label["org.opencontainers.image.description"] == PROJECT["project"]["description"]
    text = "".join(path.read_text() for path in IMAGES.iterdir())
    assert set(re.findall(r"pdfleet:(\d[\w.]*)", text)) == {VERSION}
    assert DEPENDENCIES.base == FINAL.base == "python:${PYTHON}"
    (python,) = re.findall(r"^ARG PYTHON=(\d+\.\d+)", (IMAGES / "Dockerfile").read_text(), re.M)
    low, high = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    assert int(low) <= int(python.partition(".")[2]) < int(high)


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_told_what_it_knows_and_may_do_little(name: str) -> None:
    service, settings = OURS[name], chosen(name)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert "user" not in service, "that of the image"
    # What Triton compiles there is loaded from there; Docker mounts noexec unless it is told otherwise.
    assert service["tmpfs"] == ["/tmp:exec"]
    assert service["volumes"] == ["models:/models"]
    for variable in ("HF_HOME", "PDFLEET_CACHE"):
        folder = service["environment"][variable]
        assert Path(folder).is_relative_to("/models"), "what is brought once is kept"
    assert settings.control.advertise == name, "others find it by the name of its service"
    for address in (settings.control.etcd, settings.control.nats.removeprefix("nats://")):
        assert address.partition(":")[0] in service["depends_on"]
        assert address.partition(":")[0] in FLEET
    drained = settings.http.drain_limit_s if name == "router" else ChassisSettings().drain_limit_s
    assert minutes_and_seconds(service["stop_grace_period"]) > drained
    if name != "router":
        assert settings.metrics.bind == "0.0.0.0", "Prometheus is in a container of its own"
        assert service["shm_size"], "64 MB of Docker's are none for KV"


def test_the_services_find_each_other() -> None:
    assert set(OURS) == {"router", "prefill", "decode"}
    router = chosen("router")
    (published,) = OURS["router"]["ports"]
    # There are no API keys: only this machine may ask.
    assert re.fullmatch(rf"127\.0\.0\.1:\d+:{router.http.port}", published)
    assert not any("ports" in service for name, service in FLEET.items() if name != "router")
    *_, check = OURS["router"]["healthcheck"]["test"]
    assert f"http://127.0.0.1:{router.http.port}/ready" in check
    compile(check, "healthcheck", "exec")
    etcd = dict(word.removeprefix("--").split("=", 1) for word in FLEET["etcd"]["command"][1:])
    assert etcd["listen-client-urls"] == "http://0.0.0.0:2379"
    assert etcd["advertise-client-urls"] == f"http://{router.control.etcd}"


def test_a_gpu_is_asked_for_by_workers_only_and_the_image_for_it_by_all() -> None:
    """A box without one would start none of them, were it asked for in the first file."""
    assert not any("deploy" in service for service in FLEET.values())
    more = compose(IMAGES / "compose.gpu.yaml")["services"]
    assert set(more) == set(OURS)
    for name, service in more.items():
        assert service["image"] == f"{OURS[name]['image']}-cuda"
        assert ("deploy" in service) == (name != "router")


def test_prometheus_and_grafana_see_a_fleet_in_containers() -> None:
    folder = ROOT / "deploy" / "monitoring"
    more, alone = compose(IMAGES / "compose.monitoring.yaml"), compose(folder / "compose.yaml")
    for name, service in more["services"].items():
        assert service["image"] == alone["services"][name]["image"]
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            assert source in more["volumes"] or (IMAGES / source).is_dir(), source
            assert target in {one.split(":")[1] for one in alone["services"][name]["volumes"]}
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    told = dict(one.removeprefix("--").split("=", 1) for one in more["services"]["prometheus"]["command"])
    assert "prometheus:" + told["storage.tsdb.path"] in more["services"]["prometheus"]["volumes"]
    config = yaml.safe_load((folder / "prometheus" / Path(told["config.file"]).name).read_text())
    routers, workers = config["scrape_configs"]
    address = f"router:{chosen('router').http.port}"
    assert routers["static_configs"] == [{"targets": [address]}]
    assert workers["http_sd_configs"][0]["url"] == f"http://{address}/fleet/targets"
    # Otherwise as beside a fleet on the host, so that rules and dashboards mean the same.
    other = yaml.safe_load((folder / "prometheus" / "prometheus.yml").read_text())
    assert config["global"] == other["global"]
    assert config["rule_files"] == other["rule_files"]
    assert [one["job_name"] for one in config["scrape_configs"]] == [
        one["job_name"] for one in other["scrape_configs"]
    ]
    # Its data source is 127.0.0.1:9090.
    assert more["services"]["grafana"]["network_mode"] == "service:prometheus"


def test_the_check_with_containers_is_a_program() -> None:
    assert os.access(IMAGES / "check.sh", os.X_OK)
