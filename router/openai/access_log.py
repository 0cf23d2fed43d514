"""The access log: one JSON object a line for each request. Whoever reads it slowly holds up no request."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from fleet.metrics import Family, Kind, value
from router.openai.finished import Finished
from router.openai.stream import Choice
from router.record import HandoffRecord

log = logging.getLogger(__name__)

_WAITING = 10_000
"""Lines kept for a reader that is slow; beyond, they are lost, and that is counted."""
_REASON = 160
"""Characters of a reason that are shown."""


class AccessLog:
    """Writes in a thread of its own."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        """To standard output, unless told otherwise; logs go to standard error."""
        self._stream = stream or sys.stdout.buffer
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self.lost = 0
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def tell(self, finished: Finished) -> None:
        try:
            self._lines.put_nowait(msgspec.json.encode(line_of(finished)) + b"\n")
        except queue.Full:
            self.lost += 1

    def families(self) -> list[Family]:
        return [value("pdfleet_access_log_lost", "Lines that nobody took in time.", Kind.COUNTER, self.lost)]

    def close(self, limit_s: float = 2.0) -> None:
        """Writes what is left, if its reader takes it in time."""
        try:
            self._lines.put(None, timeout=limit_s)
        except queue.Full:
            return
        self._thread.join(limit_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError) as error:
                log.error("the access log cannot be written any more: %s", error)
                return
        self._stream.flush()


def line_of(finished: Finished) -> dict[str, Any]:
    """What there was of it; a figure that was not reached is not there. No text of prompts or answers."""
    shown: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": finished.id,
        "route": finished.route,
        "status": finished.status,
        "outcome": finished.outcome,
        "seconds": round(finished.ended - finished.began, 6),
        "tenant": finished.terms.tenant,
        "class": finished.terms.slo_class,
    }
    job = finished.job
    if job is not None:
        usage = job.usage()
        shown |= {
            "model": job.choices[0].request.model,
            "stream": job.stream,
            "prompt_tokens": sum(len(one.request.prompt) for one in job.choices if one.first),
            "completion_tokens": sum(one.answer.tokens for one in job.choices),
            "cached_tokens": usage.cached_tokens,
            "answers": [_answer(choice, record) for choice, record in finished.answers()],
        }
    return shown


def _answer(choice: Choice, record: HandoffRecord | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"request": choice.request.id}
    if record is None:
        return shown
    steps = [step for step in record.transitions if step.worker is not None]
    return {
        **shown,
        **(record.outcome or {}),
        "workers": list(dict.fromkeys(str(step.worker) for step in steps)),
        "reasons": [f"{step.state.value} {step.worker}: {step.why}"[:_REASON] for step in steps],
    }
