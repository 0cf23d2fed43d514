"""Says what a step brought on the streams of a worker, and how an engine stands; the same for every role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.words import Drawn, EngineLoad, StepReport
from fleet.chassis import Stream
from fleet.events import LoadReport
from fleet.request import Usage
from fleet.stages import Stage


def tell(report: StepReport, stream_of: Callable[[str], Stream | None]) -> dict[str, Drawn]:
    """Started, scores, tokens and ends go out; returns what held sequences drew: a role says that."""
    for id in report.started:
        if (stream := stream_of(id)) is not None:
            stream.started(Stage.PREFILL_STARTED)
    for scored in report.scored:
        if (stream := stream_of(scored.id)) is not None:
            stream.scored(scored.start, scored.logprobs)
    held = {item.id for item in report.held}
    kept: dict[str, Drawn] = {}
    for drawn in report.drawn:
        if drawn.id in held:
            kept[drawn.id] = drawn
        elif (stream := stream_of(drawn.id)) is not None:
            stream.token(drawn.token, drawn.logprobs)
    for end in report.finished:
        if (stream := stream_of(end.id)) is not None:
            usage = Usage(end.prompt_tokens, end.completion_tokens, end.cached_tokens)
            stream.finished(end.finish, usage, end.error, end.message)
    return kept


def figures(base: LoadReport, load: EngineLoad, counters: Mapping[str, int]) -> LoadReport:
    """`base` with the engine's figures, and its counters beside those of the role."""
    return replace(
        base,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        prefill_tokens_s=load.prefill_tokens_s,
        decode_step_s=load.decode_step_s,
        decode_batch=load.decode_batch,
        stalled_s=load.stalled_s,
        counters={**load.counters, **counters},
    )
