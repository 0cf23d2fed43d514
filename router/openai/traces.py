"""A request's tree of spans, from its timeline and the record of its way through the fleet. Pure.

Workers make no spans of their own: they tell the router the stages that they reach, with their tokens, so
that one clock times the whole and nothing more crosses the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fleet.stages import Stage
from fleet.tracing import Attributes, Trace
from router.openai.finished import Finished
from router.openai.stream import Choice
from router.record import HandoffRecord, HandoffState, Transition


def end_trace(trace: Trace, finished: Finished) -> None:
    """Adds what became of it, and ends it."""
    trace.over(finished.ended)
    answers = list(finished.answers())
    for choice, record in answers:
        _answer(trace, choice, record, finished.ended, len(answers) > 1)
    attributes: dict[str, str | bool | int | float] = {
        "http.request.method": "POST",
        "http.route": finished.route,
        "http.response.status_code": finished.status,
        "pdfleet.request": finished.id,
        "pdfleet.outcome": finished.outcome,
        "pdfleet.class": finished.terms.slo_class,
        "pdfleet.tenant": finished.terms.tenant,
    }
    if finished.job is not None:
        attributes |= {
            "gen_ai.request.model": finished.job.choices[0].request.model,
            "gen_ai.usage.input_tokens": sum(len(c.request.prompt) for c in finished.job.choices if c.first),
            "gen_ai.usage.output_tokens": sum(choice.answer.tokens for choice in finished.job.choices),
        }
    trace.end(attributes, finished.outcome if finished.ours else "")


def _answer(trace: Trace, choice: Choice, record: HandoffRecord | None, ended: float, grouped: bool) -> None:
    """Its parts, under a span of their own where a request has several answers."""
    if choice.timeline is None:
        return
    start, marks = choice.timeline.start, choice.timeline.marks
    parent: Any = None

    def part(name: str, begin: float | None, end: float | None, attributes: Attributes) -> Any:
        """Of seconds since acceptance; one that was not reached is no span, one not left ends with all."""
        if begin is None:
            return None
        until = ended if end is None else start + end
        return trace.span(name, start + begin, until, attributes, parent)

    if grouped:
        parent = part("answer", 0.0, marks.get(Stage.ENDED), {"pdfleet.answer": choice.index})
    steps = record.transitions if record is not None else []
    legs = [step for step in steps if step.considered is not None]
    """Workers as they were chosen."""
    tokenized, sent, first = (
        marks.get(stage) for stage in (Stage.TOKENIZED, Stage.PREFILL_SENT, Stage.FIRST_TOKEN)
    )
    part(
        "ingress", marks.get(Stage.ACCEPTED), tokenized, {"pdfleet.prompt_tokens": len(choice.request.prompt)}
    )
    decided = record.admission if record is not None else []
    admitted = decided[-1]["at_s"] if decided else tokenized
    if decided:
        part("admission", tokenized, admitted, {"pdfleet.why": "; ".join(str(one["why"]) for one in decided)})
    if sent is not None:
        part("route", admitted, sent, _told(legs[:1]))
    queued = marks.get(Stage.PREFILL_STARTED)
    waited = {"pdfleet.queued_s": queued - sent} if queued is not None and sent is not None else {}
    prompts = [
        leg for leg in legs if leg.state is HandoffState.PREFILLING and (first is None or leg.at <= first)
    ]
    part("prefill", sent, first, {**waited, **_told(prompts)})
    part("transfer", marks.get(Stage.PULL_STARTED), marks.get(Stage.PULL_ENDED), {})
    handed, over = marks.get(Stage.DECODE_SENT), marks.get(Stage.ENDED)
    part("decode", handed if handed is not None else first, over, _told(legs))
    for leg, lost in _lost(steps, first):
        part("attempt", leg.at, lost.at, {**_told([leg]), "pdfleet.lost": lost.why})
    part("stream", first, over, {"pdfleet.completion_tokens": choice.answer.tokens})


def _told(legs: Sequence[Transition]) -> Attributes:
    """The last one's worker, and why it was chosen."""
    return {"pdfleet.worker": str(legs[-1].worker), "pdfleet.why": legs[-1].why} if legs else {}


def _lost(steps: Sequence[Transition], first: float | None) -> Iterator[tuple[Transition, Transition]]:
    """Each worker that was asked in vain: the step to it, and the one that says why. `first`: when the first
    token came; a prefill worker that gave it and keeps no KV has done its part."""
    leg: Transition | None = None
    for step in steps:
        if step.considered is not None:
            leg = step
        elif (
            leg is not None
            and step.worker == leg.worker
            and step.state in (HandoffState.RESERVED, HandoffState.READY)
        ):
            done = leg.state is HandoffState.PREFILLING and (
                step.state is HandoffState.READY or step.at == first
            )
            if not done:
                yield leg, step
