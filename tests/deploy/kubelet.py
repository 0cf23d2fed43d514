"""A tiny kubelet, for tests: pods are processes of this machine, each at a loopback address of its own.

Of a container it takes command, arguments, variables, probes, preStop, grace, and Secrets that are mounted;
not image, other volumes, limits. What listens on 0.0.0.0 in a pod's network listens on its address here. The
image's entry point, which `args` are given to, only passes signals on to them: without a namespace of its own
no process is number 1, and each hears its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import secrets
import signal
import sys
from pathlib import Path

import aiohttp
from cluster_nodes import OnNode

from fleet.cluster import Object, Resource

ROOT = Path(__file__).parents[2]
SECRETS = Resource("v1", "Secret", "secrets")


class ProcessKubelet:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        self._hosts = 0
        self.exits: dict[str, int] = {}
        """Pod → exit code of its process, of those that were asked to go."""
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self, own: OnNode, pod: Object) -> None:
        name, spec = own.name, pod["spec"]
        (container,) = spec["containers"]
        self._hosts += 1
        address = f"{self._net}.{self._hosts}"
        live = asyncio.ensure_future(self._start(own, address, spec))
        try:
            await own.asked_to_go()
            await own.set_ready(False)
            live.cancel()
            await asyncio.gather(live, return_exceptions=True)
            await self._stop(name, address, container, spec["terminationGracePeriodSeconds"])
            await own.finish()
        finally:
            live.cancel()
            if (process := self.processes.get(name)) is not None and process.returncode is None:
                process.kill()
                await process.wait()

    async def _start(self, own: OnNode, address: str, spec: Object) -> None:
        """Containers do not start before their Secrets are there."""
        (container,) = spec["containers"]
        creating = {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": False,
            "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}},
        }  # fmt: skip
        await own.tell(podIP=address, phase="Pending", containerStatuses=[creating])
        while (mounts := await self._mounted(own, container, spec["volumes"])) is None:
            await asyncio.sleep(0.25)
        container = {**container, "args": [_moved(one, mounts) for one in container.get("args", [])]}
        await self._live(own, address, container)

    async def _mounted(self, own: OnNode, container: Object, volumes: list[Object]) -> dict[str, str] | None:
        """Where what is to be at a path of the container is here; None: a Secret, or a key of it, is missing,
        which an event tells as a real kubelet does."""
        secrets_of = {one["name"]: one["secret"] for one in volumes if "secret" in one}
        found = {}
        for mount in container.get("volumeMounts", []):
            if (source := secrets_of.get(mount["name"])) is None:
                continue
            failed = f'MountVolume.SetUp failed for volume "{mount["name"]}" : '
            live = await own.read(SECRETS, source["secretName"])
            if not live:
                await own.warn("FailedMount", f'{failed}secret "{source["secretName"]}" not found')
                return None
            data = live.get("data", {})
            files = {one["path"]: one["key"] for one in source.get("items", [])} or {key: key for key in data}
            for key in files.values():
                if key not in data:
                    await own.warn("FailedMount", f"{failed}references non-existent secret key: {key}")
                    return None
            folder = self._folder / f"{own.name}.{mount['name']}"
            folder.mkdir(exist_ok=True)
            for path, key in files.items():
                (folder / path).write_bytes(base64.b64decode(data[key]))
            found[mount["mountPath"]] = str(folder)
        return found

    def _command(self, command: list[str], address: str, env: dict[str, str]) -> list[str]:
        found = []
        for part in command:
            part = re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), part)
            found.append(part.replace("0.0.0.0", address))
        return [sys.executable if found[0] == "python" else found[0], *found[1:]]

    def _variables(self, name: str, address: str, container: Object) -> dict[str, str]:
        fields = {"metadata.name": name, "status.podIP": address}
        given = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container.get("env", [])
        }
        return {**os.environ, "PYTHONPATH": str(ROOT), **given}

    async def _live(self, own: OnNode, address: str, container: Object) -> None:
        """Starts it, again where it ends, and says how its probes go."""
        name, restarts = own.name, 0
        env = self._variables(name, address, container)
        command = self._command([*container.get("command", []), *container["args"]], address, env)

        async def tell(state: Object, last: Object) -> None:
            said = {
                "name": container["name"], "image": container["image"], "imageID": "", "ready": False,
                "restartCount": restarts, "state": state, "lastState": last,
            }  # fmt: skip
            await own.tell(phase="Running", containerStatuses=[said])

        while True:
            with (self._folder / f"{name}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *command, env=env, cwd=self._folder, stdout=log, stderr=log, start_new_session=True
                )
            self.processes[name] = process
            await tell({"running": {}}, {})
            probing = asyncio.ensure_future(self._probe(own, address, container))
            try:
                await process.wait()
            finally:
                probing.cancel()
            await own.set_ready(False)
            restarts += 1
            ended = {"terminated": {"exitCode": process.returncode}}
            await tell({"waiting": {"reason": "CrashLoopBackOff"}}, ended)
            await asyncio.sleep(min(10.0, 0.2 * 2**restarts))

    async def _probe(self, own: OnNode, address: str, container: Object) -> None:
        if "readinessProbe" not in container:
            await own.set_ready(True)
            return
        probe = container["readinessProbe"]["httpGet"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        url = f"{probe['scheme'].lower()}://{address}:{ports[probe['port']]}{probe['path']}"
        was = False
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                ready = False
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with session.get(url) as response:
                        ready = response.status == 200
                if ready is not was:
                    await own.set_ready(ready)
                    was = ready
                await asyncio.sleep(0.25)

    async def _stop(self, name: str, address: str, container: Object, grace_s: float) -> None:
        process = self.processes.get(name)
        if process is None or process.returncode is not None:
            return
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        try:
            async with asyncio.timeout(grace_s):
                if hook:
                    env = self._variables(name, address, container)
                    command = self._command(hook, address, env)
                    await (await asyncio.create_subprocess_exec(*command, env=env)).wait()
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        self.exits[name] = process.returncode or 0

    def logs(self) -> str:
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}"
            for file in sorted(self._folder.glob("*.log"))
        )


def _moved(argument: str, mounts: dict[str, str]) -> str:
    for path, here in mounts.items():
        argument = argument.replace(f"{path}/", f"{here}/")
    return argument
