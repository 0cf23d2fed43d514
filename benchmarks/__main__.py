"""Runs benchmarks by name: `python -m benchmarks [--list] [--quick] [NAME…]`; without a name, all of them.

A benchmark is a module in `micro/`, `load/` or `sim/` with `main(argv)`; it prints one JSON line a case (see
`report.py`) and takes `--quick` for a short run that proves it works. Each runs in a process of its own, so
that one cannot warm, slow or end another. What is in `peers/` is run by a benchmark, with the Python of that
peer; what is in `gpu/`, by `gpu/run.sh` on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOMS = ("micro", "load", "sim")
_COMMANDS = {"live-soak": "benchmarks.soak"}
"""Long runs, each with options of its own (`NAME --help`); never among all of them."""


def discover() -> dict[str, str]:
    """Module of each benchmark by its name, `room/name`."""
    found: dict[str, str] = {}
    for room in _ROOMS:
        for file in sorted((_HERE / room).glob("*.py")):
            if re.search(r"^def main\(", file.read_text(), re.MULTILINE):
                found[f"{room}/{file.stem}"] = f"benchmarks.{room}.{file.stem}"
    return found


def select(names: list[str], known: dict[str, str]) -> list[str]:
    """Benchmarks that the given names mean: `room/name`, a name alone, or a room."""
    chosen: list[str] = []
    for name in names or _ROOMS:
        hits = [key for key in known if name in (key, *key.split("/"))]
        if names and not hits:
            raise SystemExit(f"no benchmark {name!r}; there are: {', '.join(known) or 'none'}")
        chosen += [key for key in hits if key not in chosen]
    return chosen


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in _COMMANDS:
        command = [sys.executable, "-m", _COMMANDS[given[0]], *given[1:]]
        return subprocess.run(command, cwd=_HERE.parent, check=False).returncode
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name them and leave")
    parser.add_argument("--quick", action="store_true", help="short runs: numbers mean little")
    options = parser.parse_args(given)
    known = discover()
    if options.list:
        print("\n".join([*known, *_COMMANDS]))
        return 0
    failed = []
    for name in select(options.names, known):
        code = f"import sys; from {known[name]} import main; sys.exit(main(sys.argv[1:]))"
        flags = ["--quick"] if options.quick else []
        if subprocess.run([sys.executable, "-c", code, *flags], cwd=_HERE.parent, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
