"""Which attention backend a replica uses, and why; said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from engine.attention.gather import GatherAttention
from engine.attention.protocol import Attention
from engine.kv_pool import KvPool
from engine.settings import EngineSettings
from fleet.errors import BadRequest
from fleet.kv_layout import KvLayout

if TYPE_CHECKING:
    from engine.attention.triton import TritonAttention
    from engine.graphs import DecodeGraphs

log = logging.getLogger(__name__)

_Attempt = Callable[[KvPool], "tuple[Attention[Any] | None, str]"]
"""The backend over a pool and what speaks for it; or None and what it lacks."""


def _cpu(pool: KvPool) -> tuple[Attention[Any] | None, str]:
    from engine.attention.cpu import CpuAttention
    from engine.native.library import Unusable

    try:
        return CpuAttention(pool), "C kernels over the pages"
    except Unusable as why:
        return None, str(why)


def _triton(pool: KvPool) -> tuple[Attention[Any] | None, str]:
    try:
        from engine.attention.triton import TritonAttention

        return TritonAttention(pool), "Triton kernels over the pages"
    except ImportError:
        return None, "triton is not installed"
    except ValueError as why:
        return None, str(why)


def _flashinfer(pool: KvPool) -> tuple[Attention[Any] | None, str]:
    try:
        from engine.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(pool), "FlashInfer over the pages"
    except ImportError as why:
        return None, f"{why.name or 'triton'} is not installed"


def _gather(pool: KvPool) -> tuple[Attention[Any] | None, str]:
    return GatherAttention(pool), "plain torch"


BACKENDS: dict[str, _Attempt] = {"cpu": _cpu, "triton": _triton, "gather": _gather, "flashinfer": _flashinfer}
"""In the order in which `auto` tries them; a module that needs much is imported in its attempt. `gather`
works anywhere; what comes after it is used only where it is asked for."""


def capture_decodes(
    model: Any, attention: Attention[Any], layout: KvLayout, settings: EngineSettings, max_tokens: int
) -> DecodeGraphs | None:
    """Graphs of the decode steps of a model, where there can be any: on CUDA, under Triton's attention."""
    if not settings.graphs or not getattr(attention, "capturable", False):
        return None
    from engine.graphs import CudaCapture, DecodeGraphs
    from engine.padding import sizes_for

    return DecodeGraphs(
        model,
        cast("TritonAttention", attention),
        layout,
        sizes=sizes_for(settings.max_batch),
        max_tokens=max_tokens,
        capture=CudaCapture(),
    )


def choose_attention(name: str, pool: KvPool) -> Attention[Any]:
    """BadRequest where the one that was asked for by name does not work here, with the reason."""
    if name != "auto" and name not in BACKENDS:
        raise BadRequest(f"attention {name!r} is not one of auto, {', '.join(BACKENDS)}")
    lacks: list[str] = []
    for backend, attempt in BACKENDS.items():
        if name not in ("auto", backend):
            continue
        if name == "auto" and backend == "triton" and pool.memory.device.type != "cuda":
            continue  # its interpreter is for tests
        attention, why = attempt(pool)
        if attention is not None:
            log.info("attention: %s (%s)", backend, "; ".join([why, *lacks]))
            return attention
        lacks.append(f"{backend}: {why}")
    raise BadRequest(f"attention {name!r} does not work here: {'; '.join(lacks)}")
