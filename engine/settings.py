"""What an operator may set about one engine; every field with its unit and the reason of its default."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.bounds import GrammarSettings

MOST_SLOTS = 4096
"""Sequences in a step at most: more than any device computes at once."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Raises ValueError, naming the field, when a value could never work."""

    block_size: int = 16
    """Tokens a KV block. 16: a shared prefix is found to within 16 tokens, and the unused rest of last
    blocks stays small."""

    kv_memory_bytes: int = 0
    """Bytes of memory for KV blocks. 0: on a CPU 1 GiB, which holds about 46,000 tokens of the demo model in
    bf16; on a GPU what `memory_share` leaves beside weights and steps."""

    memory_share: float = 0.9
    """Part of a GPU's memory that this process may take in all. Two workers on one GPU: 0.45 each."""

    graphs: bool = True
    """Whether decodes run as captured CUDA graphs where Triton's attention does. Off starts sooner and takes
    less memory, and each step waits for its launches."""

    overlap: str = "auto"
    """Whether the next step is planned, laid out and asked for while one runs: on, off, or auto, which is on
    where the device is a GPU. There a step is about as short as what it hides; on a CPU next to nothing is
    gained, and a request that comes waits for one step more."""

    max_batch: int = 32
    """Sequences in a step. 32: beyond it a CPU gains little throughput and every stream slows down."""

    max_step_tokens: int = 512
    """Tokens computed in a step, decodes and prompt chunks together: the dial between TTFT (more) and
    TPOT (less), since a decode that shares its step with a prompt chunk waits for it. 512 is about
    0.8 s of prompt computation on one core; on a GPU set 2,048 or more."""

    short_prompt_share: float = 0.25
    """Part of the prompt tokens of a step that goes to the shortest prompts while an older, longer one is
    being computed. At 0.25 the long one takes at most a third longer, and a short prompt never waits for
    it to end. 0 is strict order of arrival."""

    max_waiting: int = 1024
    """Sequences that may wait for a place in the batch; one more is refused as `Overloaded`."""

    dtype: str = "auto"
    """Type of weights, products and KV: float32, bfloat16, float16 or auto, which is bfloat16 where the
    device multiplies in it, else float32. All workers that hand KV to each other need the same."""

    device: str = "auto"
    """cpu, cuda, cuda:N or auto, which is cuda where there is a device. KV on a device is copied to host
    memory when it is handed over, and back."""

    weights: str = "auto"
    """Type of the matrices: auto is `dtype`; int8 (CPU only) halves the bytes of a decode step, to which its
    time goes, for answers that differ slightly. All workers that hand KV to each other need the same."""

    attention: str = "auto"
    """Backend of attention: cpu (C kernels, compiled at the first start where there is a compiler), triton
    (kernels for NVIDIA GPUs), flashinfer (where that is installed), gather (plain torch, anywhere) or auto,
    the fastest that works on the device; flashinfer only if asked for. Which it is, and why, is logged."""

    threads: int = 1
    """CPU threads of a step. 1: a worker a core is what a prefill and a decode worker on two cores want."""

    prefix_cache: bool = True
    """Whether KV blocks are kept and found again by what is in them. Off costs nothing per block, for
    traffic whose prompts share no beginning."""

    lend_share: float = 0.25
    """Part of the KV blocks that other workers may have pinned here at once, to read what the prefix cache
    holds. A loan lasts as long as reading it takes; 0 lends nothing."""

    grammar: GrammarSettings = field(default_factory=GrammarSettings)

    def __post_init__(self) -> None:
        if self.kv_memory_bytes < 0:
            raise ValueError(
                f"kv_memory_bytes is {self.kv_memory_bytes}; it must be 0 (what there is) or more"
            )
        if self.overlap not in ("auto", "on", "off"):
            raise ValueError(f"overlap is {self.overlap!r}; it must be auto, on or off")
        if self.max_batch > MOST_SLOTS:
            raise ValueError(f"max_batch is {self.max_batch}; it must be at most {MOST_SLOTS}")
        if not 0.05 <= self.memory_share <= 1.0:
            raise ValueError(f"memory_share is {self.memory_share}; it must be between 0.05 and 1")
        for name in ("block_size", "max_batch", "max_waiting", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_step_tokens <= self.max_batch:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; it must be more than "
                f"max_batch ({self.max_batch}), so that decodes leave room for a prompt in every step"
            )
        if not 0.0 <= self.lend_share <= 0.9:
            raise ValueError(f"lend_share is {self.lend_share}; it must be between 0 and 0.9")
        if not 0.0 <= self.short_prompt_share <= 0.9:
            raise ValueError(f"short_prompt_share is {self.short_prompt_share}; it must be between 0 and 0.9")
