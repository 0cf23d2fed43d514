"""The shim between supervisor and child: same process, and never one without a parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from fleetctl import child

SHIM = [sys.executable, "-I", "-S", str(Path(child.__file__))]


def test_it_becomes_the_command() -> None:
    command = [*SHIM, str(os.getpid()), sys.executable, "-c", "import os; print(os.getpid())"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate()
    assert int(output) == process.pid


def test_a_missing_command_is_named() -> None:
    done = subprocess.run([*SHIM, str(os.getpid()), "/no/such/program"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "/no/such/program: No such file or directory\n"


def test_it_does_not_start_for_a_parent_that_is_gone() -> None:
    done = subprocess.run([*SHIM, "1", sys.executable, "-c", "print('ran')"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "gone" in done.stderr


def test_the_child_dies_with_its_parent() -> None:
    # The parent starts the shim, says the child's pid, and waits to be killed. The child holds the
    # write end of a pipe: its end of file is the child's death.
    read, write = os.pipe()
    script = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen({SHIM!r} + [str(os.getpid()), sys.executable, '-c',"
        f" 'import os, time; os.write({write}, b\"up\"); time.sleep(600)'], pass_fds=({write},))\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], pass_fds=(write,))
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read(2) == b"up"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert pipe.read() == b""
