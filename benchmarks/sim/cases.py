"""What the simulated experiments share: a case played and told as a line, and the models of time in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import emit
from fleet.workload import Conversation
from fleetctl.sim.devices import GPUS, MODELS
from fleetctl.sim.play import simulate
from fleetctl.sim.report import report
from fleetctl.sim.speed import Roofline, Work
from fleetctl.sim.words import Setup

ROOFLINE = Roofline(MODELS["llama-3.1-8b"], GPUS["h100"])


@dataclass(frozen=True, slots=True)
class PublishedTimes:
    """Those of Dynamo's offline replay, so that its published figures can be compared: polynomials in the new
    tokens of a step, and in the share of KV memory that is read; a step of both takes both.

    The quadratic part counts a step's own tokens only: a long prompt in chunks costs less than any real one.
    """

    kv_tokens: int = 16384 * 64
    """Of a worker: supposed, the published run does not say."""

    def step_s(self, work: Work) -> float:
        milliseconds = 0.0
        if work.prompt:
            milliseconds += 16.50142 + 1.518344e-2 * work.prompt + 4.209989e-7 * work.prompt**2
        if work.decodes:
            share = work.context / self.kv_tokens
            milliseconds += max(1.0, 5.74 + 54.01 * share - 25.74 * share**2)
        return milliseconds / 1000

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "published", **asdict(self)}


def play(case: str, setup: Setup, workload: Iterable[Conversation], **told: object) -> dict[str, Any]:
    """Prints the line: TTFT of every request in ms, and the figures in the settings."""
    (said,) = play_all(case, setup, [workload], **told)
    return said


def play_all(
    case: str, setup: Setup, workloads: Sequence[Iterable[Conversation]], **told: object
) -> list[dict[str, Any]]:
    """One line of several runs: what they attained together, and each of them."""
    ttft: list[float] = []
    runs: list[dict[str, Any]] = []
    for workload in workloads:
        played = simulate(setup, workload)
        runs.append(report(setup, played))
        outcomes = [one.outcome for one in played.asked if one.outcome is not None]
        ttft += [outcome.ttft_s * 1e3 for outcome in outcomes if outcome.ttft_s is not None]
    said = runs[0]
    attained = sum(run["all"]["attained"] for run in runs)
    counted = attained + sum(run["all"]["missed"] for run in runs)
    missed_by: Counter[str] = Counter()
    for run in runs:
        missed_by.update(run["all"]["missed_by"])
    more: dict[str, object] = {}
    if len(runs) == 1:
        more = {
            "goodput": said["all"].get("goodput"),
            "tpot_ms": said["all"].get("tpot_ms"),
            "busy": {name: role["busy_share"] for name, role in said["roles"].items()},
            "pulled_gb": round(said["transfers"]["bytes"] / 1e9, 1),
        }
    else:
        more = {"runs": [run["all"].get("attainment") for run in runs]}
    emit(
        case,
        "ms to first token",
        ttft,
        **told,
        prefill=setup.prefill,
        decode=setup.decode,
        routers=setup.routers,
        policy=setup.policy.value,
        admission=setup.admission,
        step_tokens=[setup.step_tokens, setup.decode_step_tokens],
        attained=attained,
        counted=counted,
        attainment=round(attained / counted, 4) if counted else None,
        missed_by=dict(missed_by),
        cached_share=round(sum(run["tokens"]["cached_share"] or 0.0 for run in runs) / len(runs), 4),
        cpu_s=round(sum(run["cpu_s"] for run in runs), 1),
        **more,
    )
    return runs
