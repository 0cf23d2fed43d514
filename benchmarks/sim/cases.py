"""What the simulated experiments share: a case played and told as a line, and the models of time in use."""

from __future__ import annotations

from collections.abc import Iterable
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
    played = simulate(setup, workload)
    said = report(setup, played)
    ttft = [
        one.outcome.ttft_s * 1e3 for one in played.asked if one.outcome and one.outcome.ttft_s is not None
    ]
    whole, roles = said["all"], said["roles"]
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
        attained=whole["attained"],
        counted=whole["attained"] + whole["missed"],
        attainment=whole.get("attainment"),
        goodput=whole.get("goodput"),
        missed_by=whole["missed_by"],
        tpot_ms=whole.get("tpot_ms"),
        cached_share=said["tokens"]["cached_share"],
        busy={name: role["busy_share"] for name, role in roles.items()},
        pulled_gb=round(said["transfers"]["bytes"] / 1e9, 1),
        cpu_s=said["cpu_s"],
    )
    return said
