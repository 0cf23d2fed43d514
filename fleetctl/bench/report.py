"""What a run came to: figures by class, errors, the generator itself, and how it went over time. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from fleet.goodput import End, Figures, Outcome, Percentiles, Tally, attains, percentile
from fleetctl.bench.plan import Plan
from fleetctl.bench.search import Trial
from fleetctl.bench.words import Record


def judged(plan: Plan, records: Iterable[Record]) -> list[tuple[Record, Outcome]]:
    """Those that count: ended, and due after the warm-up."""
    return [(one, one.outcome) for one in records if one.outcome is not None and one.due_s >= plan.warm_up_s]


def report(
    plan: Plan,
    records: Sequence[Record],
    *,
    sending_s: float,
    total_s: float,
    cpu_s: float,
    connections: int,
    unasked: int = 0,
    interrupted: str = "",
) -> dict[str, Any]:
    """One object, ready for JSON. Figures that were never reached are absent."""
    counted = judged(plan, records)
    window_s = max(0.0, sending_s - plan.warm_up_s)
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    whole = Tally()
    for record, outcome in counted:
        verdict = attains(outcome, plan.of(record.service_class))
        whole.add(outcome, verdict)
        tallies[record.service_class].add(outcome, verdict)
    classes = {
        name or "default": figures_dict(tally.figures(window_s)) for name, tally in sorted(tallies.items())
    }
    lag = lag_ms(records)
    told: dict[str, Any] = {
        "settings": plan.as_dict(),
        "seconds": {"sending": _round(sending_s), "judged": _round(window_s), "total": _round(total_s)},
        "requests": requests_dict(records, counted),
        "all": figures_dict(whole.figures(window_s)),
        "classes": classes,
        "tokens": tokens_dict(plan, counted, total_s),
        "errors": errors_dict(counted),
        "generator": {
            "lag_ms": lag,
            "kept_up": kept_up(plan, records),
            "cpu_share": _round(cpu_s / total_s) if total_s else None,
            "connections": connections,
            "retried": sum(one.retried for one in records),
        },
        "remarks": remarks(plan, records, counted, cpu_s / total_s if total_s else 0.0),
    }
    if unasked:
        told["requests"]["unasked_turns"] = unasked
    if interrupted:
        told["interrupted"] = interrupted
    return told


def figures_of_trial(
    plan: Plan, records: Sequence[Record], rate: float, sending_s: float, interrupted: str
) -> Trial:
    """A run as the search for a rate sees it. One that was cut short has no goodput: it had not got far."""
    tally = Tally()
    for record, outcome in judged(plan, records):
        tally.add(outcome, attains(outcome, plan.of(record.service_class)))
    figures = tally.figures(max(0.0, sending_s - plan.warm_up_s))
    facts = figures_dict(figures)
    if interrupted:
        facts["interrupted"] = interrupted
        facts.pop("goodput", None)
    return Trial(rate, figures.attained, figures.missed, kept_up(plan, records), facts.get("goodput"), facts)


def figures_dict(figures: Figures) -> dict[str, Any]:
    """Milliseconds for what is short, as objectives are."""
    told: dict[str, Any] = {
        "goodput": _round(figures.goodput),
        "attainment": _round(figures.attainment),
        "attained": figures.attained,
        "missed": figures.missed,
        "uncounted": figures.uncounted,
        "missed_by": dict(sorted(figures.reasons.items())),
    }
    for name in ("ttft", "tpot", "itl", "e2e"):
        percentiles: Percentiles | None = getattr(figures, name)
        if percentiles is not None:
            told[f"{name}_ms"] = {key: _round(value * 1e3) for key, value in asdict(percentiles).items()}
    return {key: value for key, value in told.items() if value is not None}


def requests_dict(
    records: Sequence[Record], counted: Sequence[tuple[Record, Outcome]]
) -> dict[str, int | dict[str, int]]:
    ends = Counter(str(outcome.end) for _, outcome in counted)
    return {
        "sent": len(records),
        "judged": len(counted),
        "ends": dict(sorted(ends.items())),
    }


def tokens_dict(plan: Plan, counted: Sequence[tuple[Record, Outcome]], total_s: float) -> dict[str, Any]:
    """As the server counted them. `asked` is what the workload wanted of prompts, without a template."""
    good = [record for record, outcome in counted if outcome.end is End.FINISHED]
    prompts = [one.prompt_tokens for one in good if one.prompt_tokens is not None]
    outputs = [one.output_tokens for one in good if one.output_tokens is not None]
    cached = [one.cached_tokens for one in good if one.cached_tokens is not None]
    told: dict[str, Any] = {"asked": _counts([one.asked_tokens for one in good])}
    if prompts:
        told["prompt"] = _counts(prompts)
    if cached and prompts:
        told["cached_share"] = _round(sum(cached) / max(1, sum(prompts)))
    if outputs:
        told["output"] = _counts(outputs)
        seconds = total_s - plan.warm_up_s
        told["output_per_s"] = _round(sum(outputs) / seconds) if seconds > 0 else None
        told["short_answers"] = sum((one.output_tokens or 0) < one.wanted_tokens for one in good)
    return {key: value for key, value in told.items() if value is not None}


def _counts(values: Sequence[int]) -> dict[str, int] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{percent}": round(percentile(ordered, percent)) for percent in (50, 90, 99)} | {
        "total": sum(values)
    }


def errors_dict(counted: Sequence[tuple[Record, Outcome]]) -> dict[str, Any]:
    """How many of each kind, and the words of the first."""
    told: dict[str, dict[str, Any]] = {}
    for record, _ in counted:
        if record.failure is not None:
            row = told.setdefault(
                record.failure.kind, {"count": 0, "first": " ".join(record.failure.message.split())[:300]}
            )
            row["count"] += 1
    return dict(sorted(told.items(), key=lambda item: -item[1]["count"]))


def lag_ms(records: Sequence[Record]) -> dict[str, float] | None:
    """By how much sends were late; a timer rings up to half a millisecond early, which is none."""
    if not records:
        return None
    ordered = sorted(max(0.0, one.lag_s) * 1e3 for one in records if one.outcome is not None)
    if not ordered:
        return None
    percents = {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}
    return {name: round(value, 3) for name, value in {**percents, "max": ordered[-1]}.items()}


def kept_up(plan: Plan, records: Sequence[Record]) -> bool:
    lag = lag_ms(records)
    return lag is None or lag["p99"] <= plan.lag_limit_ms


def remarks(
    plan: Plan, records: Sequence[Record], counted: Sequence[tuple[Record, Outcome]], cpu_share: float
) -> list[str]:
    """What a reader must know before believing the figures."""
    said = []
    if not kept_up(plan, records):
        lag = lag_ms(records)
        assert lag is not None, "without sends it kept up"
        said.append(
            f"the generator did not keep up: 1 % of the sends were {lag['p99']:.0f} ms late or more (limit "
            f"{plan.lag_limit_ms:g} ms); these figures are of a lower load and of the generator itself"
        )
    if cpu_share > 0.8:
        said.append(f"the generator used {cpu_share:.0%} of a core: what it adds is no longer small")
    ended = [outcome.end for _, outcome in counted]
    invalid = ended.count(End.INVALID)
    if invalid:
        said.append(f"{invalid} requests were refused as wrong in themselves, and count on neither side")
    good = [record for record, outcome in counted if outcome.end is End.FINISHED]
    if good and all(one.output_tokens is None for one in good):
        said.append("the server told no usage: events are counted as tokens")
    short = sum(one.output_tokens is not None and one.output_tokens < one.wanted_tokens for one in good)
    if plan.ignore_eos and short > len(good) / 100:
        said.append(f"{short} of {len(good)} answers are shorter than asked, although ignore_eos was sent")
    if 0 < len(counted) < 100:
        said.append(f"only {len(counted)} requests were judged: the 99th percentile is the slowest of them")
    return said


def timeline(plan: Plan, records: Sequence[Record], bins: int = 60) -> list[dict[str, Any]]:
    """Stretches of equal length, in each: requests sent and finished a second, how many ran, TTFTs."""
    ended = [(one, one.outcome) for one in records if one.outcome is not None]
    end_s = max((one.sent_s + outcome.ended_s for one, outcome in ended), default=0.0)
    if not end_s:
        return []
    width = end_s / bins
    rows: list[dict[str, Any]] = [
        {"at_s": round(place * width, 3), "sent": 0, "finished": 0, "attained": 0, "tokens": 0}
        for place in range(bins)
    ]
    changes: list[tuple[float, int]] = []
    ttfts: defaultdict[int, list[float]] = defaultdict(list)

    def row(at: float) -> int:
        return min(max(0, int(at / width)), bins - 1)

    for record, outcome in ended:
        over_s = record.sent_s + outcome.ended_s
        rows[row(record.sent_s)]["sent"] += 1
        if outcome.end is End.FINISHED:
            rows[row(over_s)]["finished"] += 1
        if attains(outcome, plan.of(record.service_class)).attained:
            rows[row(over_s)]["attained"] += 1
        for at in outcome.times:
            rows[row(record.sent_s + at)]["tokens"] += 1
        if outcome.ttft_s is not None:
            ttfts[row(record.sent_s)].append(outcome.ttft_s)
        changes += [(record.sent_s, 1), (over_s, -1)]
    changes.sort()
    running = place = 0
    for number, one in enumerate(rows):
        most = running
        while place < len(changes) and row(changes[place][0]) <= number:
            running += changes[place][1]
            most = max(most, running)
            place += 1
        one["running_most"] = most
        for name in ("sent", "finished", "attained", "tokens"):
            one[f"{name}_per_s"] = round(one.pop(name) / width, 3)
        if number in ttfts:
            one["ttft_p50_ms"] = _round(percentile(sorted(ttfts[number]), 50) * 1e3)
            one["ttft_p99_ms"] = _round(percentile(sorted(ttfts[number]), 99) * 1e3)
    return rows


def _round(value: float | None) -> float | None:
    """Four significant digits; more would claim what no run can show."""
    return None if value is None else float(f"{value:.4g}")
