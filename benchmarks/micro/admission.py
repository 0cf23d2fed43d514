"""What admission costs a request: with room, in a long queue, and refused; and a judgement at its end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from benchmarks.micro.router import measure
from benchmarks.report import emit
from fleet.goodput import End, Outcome, Rolling, attains
from fleet.ids import RequestId
from fleet.objectives import CLASSES
from fleet.request import Request, Sampling
from router.admission import Admission
from router.forecast import Forecast
from router.run import Terms
from router.settings import AdmissionSettings, FlowSettings

ROOM = Forecast(ahead_s=0.0, work_s=0.1, tpot_s=0.01, sequences=2, tokens=500, rate=10_000.0, elsewhere=False)
FULL = replace(ROOM, ahead_s=5.0)
TENANTS = 16
_numbers = count()


def one(admission: Admission, name: str, forecast: Forecast, now: float = 0.0) -> Request:
    number = next(_numbers)
    made = Request(RequestId(f"r{number}"), "m", (1,), Sampling(max_tokens=64))
    admission.enter(made, now)
    admission.arrive(made, Terms(name, CLASSES[name], f"t{number % TENANTS}"), forecast, now, now)
    return made


def crowded(waiting: int) -> Admission:
    admission = Admission(FlowSettings(max_requests=1 << 20), AdmissionSettings(max_queued=1 << 20))
    for _ in range(waiting):
        one(admission, "standard", FULL)
    return admission


def bench(case: str, work: Callable[[], object], runs: int, **settings: object) -> None:
    emit(f"admission/{case}", "µs", measure(work, runs), **settings)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs: numbers mean little")
    runs = 50 if parser.parse_args(argv).quick else 2000
    empty = crowded(0)
    bench("room", lambda: empty.leave(one(empty, "standard", ROOM).id), runs)
    for waiting in (10, 2000):
        desk = crowded(waiting)

        def turn(desk: Admission = desk) -> None:
            """One comes and the next one goes."""
            one(desk, "standard", FULL)
            desk.expired(0.0)
            head = desk.head("m", 0.0)
            assert head is not None
            desk.offer(head, ROOM, 0.0)
            desk.leave(head)

        bench("turn", turn, runs, waiting=waiting, tenants=TENANTS)
        # 120 s of prompts are ahead of it at its worker: batch is refused.
        late = replace(FULL, ahead_s=500.0)
        bench("refused", lambda d=desk, f=late: d.leave(one(d, "batch", f).id), runs, waiting=waiting)  # type: ignore[misc]
    rolling, times = Rolling(0.0), [0.5 + 0.02 * n for n in range(256)]
    ended = Outcome(End.FINISHED, times[-1], times)
    bench("judged", lambda: rolling.add(ended, attains(ended, CLASSES["standard"]), 0.0), runs, tokens=256)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
