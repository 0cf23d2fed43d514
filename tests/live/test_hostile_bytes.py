"""Bytes from anybody at every port of a running fleet: nothing runs because of them, and nothing dies."""

from __future__ import annotations

import os
import pickle
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.live, pytest.mark.model]


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def listening(pid: int) -> set[tuple[str, str]]:
    """("tcp", port) and ("unix", name) on which a process listens, by what Linux shows of it."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(entry))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                found.add(("tcp", str(int(fields[1].rpartition(":")[2], 16))))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and f"socket:[{fields[6]}]" in held and len(fields) > 7:
            found.add(("unix", fields[7]))
    return found


def say(kind: str, place: str, data: bytes) -> None:
    """Says it, and listens until the other side is silent for a moment or hangs up."""
    with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as peer:
        peer.settimeout(0.2)
        try:
            peer.connect(place.replace("@", "\0", 1) if kind == "unix" else ("127.0.0.1", int(place)))
            peer.sendall(data)
            while peer.recv(65536):
                pass
        except OSError:
            return


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ports in /proc")
def test_every_port_of_every_process(demo_fleet: dict[str, Any], tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    parents = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in parents.splitlines()[1:]:
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    ours, todo = set(), [demo_fleet["pid"]]
    while todo:
        pid = todo.pop()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if any(name in command for name in (b"router", b"prefill_worker", b"decode_worker")):
            ours.add(pid)
        todo += children.get(pid, [])
    assert len(ours) >= 3
    ports = {pid: listening(pid) for pid in ours}
    assert all(ports.values()), ports
    draw = random.Random(5)
    evil = pickle.dumps(Touch(marker))
    pieces = [evil, len(evil).to_bytes(4, "big") + evil, len(evil).to_bytes(4, "little") + evil]
    pieces += [b"\xff" * 4096, b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n"]
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
    greeting = b"\x12\0\0\0\0pdfleet.v1.Session"
    said = len(evil).to_bytes(4, "little") + b"\0" + evil
    pieces += [http2 + evil, http2, greeting + said, greeting]
    pieces += [draw.randbytes(draw.randint(1, 2000)) for _ in range(6)]
    for kind, place in sorted(set().union(*ports.values())):
        for data in pieces:
            say(kind, place, data)
    assert not marker.exists()
    for pid in ours:
        os.kill(pid, 0)
        assert listening(pid) == ports[pid]
    with openai.OpenAI(base_url=demo_fleet["url"], api_key="none", max_retries=0, timeout=120) as api:
        # Long enough to be prefilled elsewhere: the way of the KV stands too.
        messages: Any = [{"role": "user", "content": "Repeat after me: " + "one two three. " * 30}]
        answer = api.chat.completions.create(model=demo_fleet["model"], messages=messages, max_tokens=4)
    assert answer.choices[0].message.content
    pickle.loads(evil)  # noqa: S301 - made above
    assert marker.exists(), "the marker could not be made at all"
