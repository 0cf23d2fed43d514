"""Renders one chat template that came with a request: JSON on stdin, JSON on stdout, then it ends.

A process of its own because the sandbox bounds what a template may do, not what it may weigh: strings that
double in a loop fill any memory within its time.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from fleet.errors import BadRequest
from router.text.template import ChatTemplate, OutOfTime

MEMORY_BYTES = 512 << 20
"""Address space of this process: Python with Jinja takes a quarter of it."""
START_S = 10
"""Processor time for Python to start, at most."""


def answer(asked: dict[str, Any]) -> dict[str, str]:
    """`prompt`, or why there is none."""
    try:
        template = ChatTemplate(asked["source"], asked["special"], most_characters=asked["most"])
        return {
            "prompt": template.render(asked["messages"], asked["tools"], asked["variables"], asked["seconds"])
        }
    except OutOfTime:
        return {"late": ""}
    except BadRequest as error:
        return {"refused": error.message}
    except ValueError as error:
        return {"refused": str(error)}
    except (MemoryError, RecursionError):
        return {"refused": "the chat template takes too much memory"}


def main() -> None:
    asked = json.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    processor = START_S + int(asked["seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (processor, processor))
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    text = json.dumps(answer(asked))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
