"""What became of a router's requests, by model and class: totals and durations since start. Pure.

Every request that was taken on is counted once as received and once by its end, whatever it was. Durations
are those of `fleet.goodput.Outcome` and of the request's timeline: what was not reached is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

from fleet.goodput import End, Outcome, Verdict
from fleet.metrics import (
    BETWEEN_S,
    FIRST_S,
    STAGE_S,
    WHOLE_S,
    Buckets,
    Family,
    Labels,
    counter,
    gauge,
    histogram,
)
from fleet.stages import Stage
from router.admission import Decision
from router.record import HandoffRecord, HandoffState

STAGES: Mapping[str, tuple[Stage, Stage]] = {
    "tokenize": (Stage.ACCEPTED, Stage.TOKENIZED),
    "admission": (Stage.TOKENIZED, Stage.PREFILL_SENT),
    "queue": (Stage.PREFILL_SENT, Stage.PREFILL_STARTED),
    "prefill": (Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
    "transfer": (Stage.PULL_STARTED, Stage.PULL_ENDED),
    "second_token": (Stage.FIRST_TOKEN, Stage.SECOND_TOKEN),
    "decode": (Stage.FIRST_TOKEN, Stage.ENDED),
}
"""Parts of a request's life that are shown, each with where it begins and ends."""

OTHER = "other"
"""Stands for every model that no worker ever served here."""

_HANDOFFS = {
    HandoffState.DONE: "completed",
    HandoffState.READY: "tried_again",
    HandoffState.RESERVED: "kv_lost",
    HandoffState.FAILED: "failed",
    HandoffState.RELEASED: "cancelled",
}
"""What followed on handing a ticket to a decode worker."""


_JUDGED = {None: "uncounted", True: "attained", False: "missed"}


class Meters:
    def __init__(self) -> None:
        self.models: set[str] = set()
        """Names that workers have ever served: the only ones that stand in labels."""
        self._received: Counter[Labels] = Counter()
        self._ended: Counter[Labels] = Counter()
        self._in_flight: Counter[Labels] = Counter()
        self._judged: Counter[Labels] = Counter()
        self._served: Counter[Labels] = Counter()
        self._missed: Counter[Labels] = Counter()
        self._handoffs: Counter[Labels] = Counter()
        self._prompt_tokens: Counter[Labels] = Counter()
        self._cached_tokens: Counter[Labels] = Counter()
        self._generated: Counter[Labels] = Counter()
        self._durations: dict[str, dict[Labels, Buckets]] = {name: {} for name in _DURATIONS}
        self._stages: dict[Labels, Buckets] = {}
        self._forecasts: dict[str, dict[Labels, Buckets]] = {name: {} for name in _FORECASTS}
        self._errors: dict[str, dict[Labels, Buckets]] = {name: {} for name in _FORECASTS}

    def labels(self, model: str, slo_class: str) -> Labels:
        """What a request is counted under from its begin to its end, whoever comes and goes meanwhile."""
        return (model if model in self.models else OTHER, slo_class)

    def began(self, labels: Labels) -> None:
        self._received[labels] += 1
        self._in_flight[labels] += 1

    def ended(
        self,
        labels: Labels,
        end: str,
        outcome: Outcome,
        verdict: Verdict,
        record: HandoffRecord,
        promised: Decision | None,
    ) -> None:
        """`end`: how it finished, or `outcome.end`. `promised`: what was forecast when it came; None: it was
        not."""
        model, slo_class = labels
        self._in_flight[labels] -= 1
        self._ended[*labels, end] += 1
        self._judged[*labels, _JUDGED[verdict.attained]] += 1
        for reason in verdict.missed:
            self._missed[slo_class, reason] += 1
        for name, seconds in (
            ("first", outcome.ttft_s),
            ("each", outcome.tpot_s),
            ("whole", outcome.e2e_s),
        ):
            if seconds is not None:
                self._of(self._durations[name], labels, _DURATIONS[name][2]).observe(seconds)
        if len(outcome.times) > 1:
            self._of(self._durations["between"], labels, BETWEEN_S).observe_all(outcome.gaps)
        self._lived(model, outcome.stages)
        self._handed(record)
        if promised is not None:
            self._foretold("ttft", slo_class, promised.ttft_s, outcome.ttft_s)
            # Of an answer that was broken off it is not known what its pace would have been.
            finished = outcome.end is End.FINISHED
            self._foretold("tpot", slo_class, promised.tpot_s, outcome.tpot_s if finished else None)

    def served(self, revisions: Iterable[str], verdict: Verdict) -> None:
        """By workers of these; by whose, when both old and new ones had a part in it, nobody can tell."""
        if together := "+".join(sorted(revisions)):
            self._served[together, _JUDGED[verdict.attained]] += 1

    def used(self, labels: Labels, prompt: int, cached: int, generated: int) -> None:
        """Tokens of one whose first token came, however it ended; once."""
        self._prompt_tokens[labels] += prompt
        self._cached_tokens[labels] += cached
        self._generated[labels] += generated

    def families(self) -> Iterable[Family]:
        by_class = ("model", "slo_class")
        yield counter("pdfleet_requests_received", "Requests taken on: answers to be made.",
                      by_class, self._received)  # fmt: skip
        yield counter("pdfleet_requests_ended",
                      "Of those, the ones that ended: stop, length, cancelled, rejected, timed_out, failed "
                      "or invalid (the client's own error).", (*by_class, "end"), self._ended)  # fmt: skip
        yield gauge("pdfleet_requests_in_flight", "Of those, the ones that have not ended.",
                    by_class, self._in_flight)  # fmt: skip
        yield counter("pdfleet_requests_judged", "Ended requests by whether they met their objectives.",
                      (*by_class, "verdict"), self._judged)  # fmt: skip
        yield counter("pdfleet_revision_requests_judged", "The same by what workers were started of "
                      "(chassis.revision), several with +; of workers that say so.",
                      ("revision", "verdict"), self._served)  # fmt: skip
        yield counter("pdfleet_objectives_missed", "What those that did not attain had missed.",
                      ("slo_class", "reason"), self._missed)  # fmt: skip
        yield counter("pdfleet_handoffs", "Tickets given to decode workers: completed, tried_again, kv_lost, "
                      "failed or cancelled.",
                      ("outcome",), self._handoffs)  # fmt: skip
        yield counter("pdfleet_prompt_tokens", "Tokens of prompts whose first token came.",
                      by_class, self._prompt_tokens)  # fmt: skip
        yield counter("pdfleet_cached_tokens", "Of those, found in the cache where the prompt was computed.",
                      by_class, self._cached_tokens)  # fmt: skip
        yield counter("pdfleet_generation_tokens", "Tokens of answers, those of cancelled requests included.",
                      by_class, self._generated)  # fmt: skip
        for key, (name, help, _) in _DURATIONS.items():
            yield histogram(name, help, by_class, self._durations[key])
        yield histogram("pdfleet_stage_seconds",
                        "Parts of a request's life: tokenize, admission (until it was sent), queue (at its "
                        "worker), prefill, transfer (waited for KV), second_token (after the first), decode.",
                        ("model", "stage"), self._stages)  # fmt: skip
        for key, (what, _) in _FORECASTS.items():
            yield histogram(f"pdfleet_{key}_forecast_seconds",
                            f"{what} as forecast at arrival, of requests that had one.",
                            ("slo_class",), self._forecasts[key])  # fmt: skip
            yield histogram(f"pdfleet_{key}_forecast_error_seconds",
                            f"{what}: how much earlier or later than forecast it was.",
                            ("slo_class", "direction"), self._errors[key])  # fmt: skip

    def _foretold(self, name: str, slo_class: str, forecast_s: float | None, actual_s: float | None) -> None:
        if forecast_s is None or actual_s is None:
            return
        bounds, off = _FORECASTS[name][1], actual_s - forecast_s
        self._of(self._forecasts[name], (slo_class,), bounds).observe(forecast_s)
        direction = "later" if off > 0 else "earlier"
        self._of(self._errors[name], (slo_class, direction), bounds).observe(abs(off))

    def _lived(self, model: str, marks: Mapping[Stage, float]) -> None:
        for name, (begin, end) in STAGES.items():
            started, ended = marks.get(begin), marks.get(end)
            if started is not None and ended is not None:
                self._of(self._stages, (model, name), STAGE_S).observe(ended - started)

    def _handed(self, record: HandoffRecord) -> None:
        steps = record.transitions
        for step, following in pairwise(steps):
            if step.state is HandoffState.PULLING and following.state in _HANDOFFS:
                self._handoffs[(_HANDOFFS[following.state],)] += 1

    @staticmethod
    def _of(held: dict[Labels, Buckets], labels: Labels, bounds: tuple[float, ...]) -> Buckets:
        buckets = held.get(labels)
        if buckets is None:
            buckets = held[labels] = Buckets(bounds)
        return buckets


_FORECASTS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "ttft": ("Time to the first token", FIRST_S),
    "tpot": ("Time per output token", BETWEEN_S),
}
"""The first is the prefill workers' work, the second the decode workers'."""
_DURATIONS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "first": (
        "pdfleet_time_to_first_token_seconds",
        "Accepted by the ingress to first token written to the client.",
        FIRST_S,
    ),
    "between": ("pdfleet_inter_token_seconds", "Between two tokens as the client sees them.", BETWEEN_S),
    "each": (
        "pdfleet_time_per_output_token_seconds",
        "(Last token - first token) / (tokens - 1), of answers of at least two.",
        BETWEEN_S,
    ),
    "whole": ("pdfleet_request_seconds", "Accepted to last byte, of requests that finished.", WHOLE_S),
}
