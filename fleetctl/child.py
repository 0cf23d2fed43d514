"""Runs a command that dies with the process that started it: `python child.py PARENT_PID COMMAND ARG…`.

A file of its own, run with `-I -S`, so that it costs a few milliseconds and works before anything of
the child is imported. Code between fork and exec in the supervisor itself would not be safe there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        # SIGKILL: without its supervisor nobody would end a child whose drain takes for ever.
        # The signal is tied to the thread that forked: the supervisor forks in its main thread.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the supervisor is gone already")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
