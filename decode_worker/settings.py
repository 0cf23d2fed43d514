"""Settings of a decode worker's process."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.settings import EngineSettings
from fleet.chassis import ChassisSettings
from fleet.metrics_server import MetricsSettings
from fleet.settings import ControlSettings
from fleet.wire.session import WireSettings
from kv_transfer.settings import TransferSettings


@dataclass(frozen=True, slots=True)
class DecodeWorkerSettings:
    """A process that brings or computes KV and writes tokens."""

    model: str = "smollm2"
    """Folder, .gguf file, hub name, or `smollm2`."""
    served_model_name: str = ""
    """Name clients use; empty: the model's own."""
    worker_id: str = ""
    """Name of this worker in the fleet; empty: drawn."""
    port: int = 0
    """Of the control server (gRPC); 0 takes a free one."""
    session_port: int = 0
    """Where routers open sessions, for jobs and tokens; 0 takes a free one."""
    other_role: str = ""
    """Flags of a prefill worker's process, for when this one takes that role: `--engine.max-step-tokens=64`,
    or `--config FILE`. Only limits and sizes of steps are taken from them: engine and addresses stay."""
    pull_limit_s: float = 5.0
    """Longest a pull of KV may take, seconds; after it the prompt is computed here. Shorter than a lease."""
    control: ControlSettings = field(default_factory=ControlSettings)
    chassis: ChassisSettings = field(default_factory=ChassisSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    wire: WireSettings = field(default_factory=WireSettings)
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(max_step_tokens=128))
    """Smaller steps than a prefill worker's: every running stream waits for a prompt chunk beside it."""
    transfer: TransferSettings = field(default_factory=TransferSettings)

    def __post_init__(self) -> None:
        if not 0 < self.pull_limit_s < self.transfer.lease_s:
            raise ValueError(
                f"pull_limit_s is {self.pull_limit_s}; it must be above 0 and below "
                f"transfer.lease_s ({self.transfer.lease_s}), so that a pull ends before its lease"
            )
