"""What a plan found: as one object and as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fleetctl.bench.plan import objectives_dict
from fleetctl.bench.view import lean_table, pair
from fleetctl.sim.advice import Arrangement, advise, nothing
from fleetctl.sim.planning import Planning
from fleetctl.sim.search import Trial


def as_dict(session: Planning) -> dict[str, Any]:
    """Ready for JSON. What was not searched, or never reached, is absent."""
    demand, target = session.demand, session.wanted.target
    said: dict[str, Any] = {
        "speed": {str(gpus): device.speed.as_dict() for gpus, device in session.devices.items()},
        "workload": session.plan.as_dict(),
        "demand": {
            "rate": round(demand.rate, 4),
            "prompt_tokens": round(demand.prompt, 1),
            "cached_share": round(demand.cached_share, 4),
            "output_tokens": round(demand.output, 1),
        },
        "objectives": objectives_dict(session.plan.default),
        "target": target,
        "estimate": [_arrangement(one) for one in session.considered],
        "crossing": session.crossing,
    }
    if not session.founds:
        why = nothing(session.considered, target, session.wanted.most_gpus)
        return said | ({"why": why} if why else {})
    advice = advise(session.founds, target)
    said["simulated"] = {
        "requests": len(session.played),
        "warm_up_s": round(session.warm_up_s, 2),
        "seed": session.plan.source.seed,
        "effort_s": session.wanted.effort_s,
        "spent_s": round(session.spent_s, 1),
    }
    said["searches"] = [
        {
            **_arrangement(found.arrangement),
            **({"best": _trial(found.best, found.arrangement)} if found.best is not None else {}),
            **({"skipped": found.skipped} if found.skipped else {}),
            **({"unfinished": found.unfinished} if found.unfinished else {}),
            "trials": [_trial(one, found.arrangement) for one in found.search.trials],
            "ended": found.skipped or found.unfinished or found.search.next().why,
        }
        for found in session.founds
    ]
    said["other_steps"] = [{"step_tokens": tokens, **_facts(trial)} for tokens, trial in session.tuned]
    said["why"] = advice.why
    if advice.found is not None and advice.found.best is not None:
        arrangement, best = advice.found.arrangement, advice.found.best
        said["plan"] = _trial(best, arrangement) | {"step_tokens": _steps(session, arrangement, best)}
    return said


def _steps(session: Planning, arrangement: Arrangement, best: Trial) -> int:
    """Other steps are better only where more attain than chance explains."""
    if not arrangement.apart:
        return arrangement.step_tokens
    tried = [(arrangement.step_tokens, best.attainment)]
    tried += [(tokens, trial.attainment) for tokens, trial in session.tuned if trial.shape == best.shape]
    tokens, attainment = max(tried, key=lambda one: one[1])
    return tokens if attainment > best.attainment + 0.01 else arrangement.step_tokens


def _arrangement(one: Arrangement) -> dict[str, Any]:
    told: dict[str, Any] = {
        "apart": one.apart,
        "gpus_per_worker": one.gpus,
        "step_tokens": one.step_tokens,
        "alone": round(one.alone, 4),
    }
    if one.least is not None:
        told |= {"least_prefill": one.least.prefill, "least_decode": one.least.decode}
        told |= {"least_gpus": one.least_gpus}
    return told


def _trial(one: Trial, arrangement: Arrangement) -> dict[str, Any]:
    gpus = one.shape.workers * arrangement.gpus
    told = {"prefill": one.shape.prefill, "decode": one.shape.decode, "gpus": gpus, **_facts(one)}
    told |= {"gpus_per_worker": arrangement.gpus, "apart": arrangement.apart}
    if told.get("goodput") is not None:
        told["goodput_per_gpu"] = round(told["goodput"] / gpus, 5)
    return told


def _facts(one: Trial) -> dict[str, Any]:
    facts = {key: value for key, value in one.facts.items() if value is not None}
    return {"attainment": round(one.attainment, 4), "missed_by": dict(one.missed_by), **facts}


def table(said: Mapping[str, Any]) -> RenderableType:
    """The same for people."""
    demand = said["demand"]
    limits = ", ".join(
        f"{key.removesuffix('_ms').upper()} {ms:g} ms" for key, ms in said["objectives"].items()
    )
    head = [
        Text(f"{said['model']} on {said['gpu']}", style="bold"),
        Text(
            f"{demand['rate']:.4g} requests/s, prompts of {demand['prompt_tokens']:,.0f} tokens, of which "
            f"{demand['cached_share']:.0%} were asked before,\nanswers of {demand['output_tokens']:,.0f}; "
            f"{said['target']:.0%} are to meet {limits or 'no objective'}"
        ),
        Text(),
    ]
    parts: list[RenderableType] = [*head]
    if "searches" in said:
        parts += [*_searched(said), Text()]
    else:
        parts += [_estimates(said), Text()]
    parts += [_crossing(said)]
    if "plan" in said:
        parts += [Text(), *_plan(said)]
    elif "why" in said:
        parts += [Text(), Text(said["why"], style="yellow")]
    return Group(*parts)


def _searched(said: Mapping[str, Any]) -> list[RenderableType]:
    made = lean_table("workers", "GPUs", "steps", "attained", "goodput", "TTFT ms", "TPOT ms")
    least, good, bad = said["target"], "green", "red"
    for search in said["searches"]:
        for trial in search["trials"]:
            chosen = trial == search.get("best")
            made.add_row(
                _shape(trial),
                str(trial["gpus"]),
                str(search["step_tokens"]),
                Text(f"{trial['attainment']:.1%}", style=good if trial["attainment"] >= least else bad),
                f"{trial['goodput']:.3g}/s" if "goodput" in trial else "–",
                *(pair(trial.get(f"{key}_ms")) for key in ("ttft", "tpot")),
                style="bold" if chosen else "",
            )  # fmt: skip
    run = said["simulated"]
    notes = f"{run['requests']:,} conversations each, after {run['warm_up_s']:.3g} s of warm-up; p50 / p99"
    skipped = [
        f"{_kind(one)}: {one[why]}"
        for one in said["searches"]
        for why in ("skipped", "unfinished")
        if why in one
    ]
    others = [f"{one['step_tokens']}: {one['attainment']:.1%}" for one in said["other_steps"]]
    steps = [f"attained with other steps of prefill workers, {', '.join(others)}"] if others else []
    return [made, *(Text(one, style="dim") for one in (notes, *steps, *skipped))]


def _estimates(said: Mapping[str, Any]) -> RenderableType:
    made = lean_table("by the work alone", "GPUs", "of a worker", "steps", "attain alone")
    for one in said["estimate"]:
        if "least_gpus" in one:
            shape = {"prefill": one["least_prefill"], "decode": one["least_decode"]}
            cells = (_shape(shape), str(one["least_gpus"]))
        else:
            cells = ("apart" if one["apart"] else "aggregated", "no number")
        made.add_row(*cells, str(one["gpus_per_worker"]), str(one["step_tokens"]), f"{one['alone']:.1%}")
    return made


def _crossing(said: Mapping[str, Any]) -> RenderableType:
    rates = [row["rate"] for row in said["crossing"]]
    titles = (f"{one:{'.2g' if one < 10 else '.0f'}}" for one in rates)
    made = lean_table("requests/s (work alone)", *titles)
    for name in ("apart", "aggregated"):
        made.add_row(f"GPUs {name}", *(str(row.get(name, "–")) for row in said["crossing"]))
    return made


def _plan(said: Mapping[str, Any]) -> list[RenderableType]:
    best = said["plan"]
    each = f"{best['gpus_per_worker']} {said['gpu']} each"
    steps = f"steps of {best['step_tokens']}"
    if best["prefill"]:
        prefill, decode = (_many(best[role], f"{role} worker") for role in ("prefill", "decode"))
        told = f"{prefill} ({steps}) and {decode}, {each}"
    else:
        told = f"{_many(best['decode'], 'aggregated worker')} ({steps}), {each}"
    return [Text(told, style="bold green"), Text(said["why"])]


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _shape(trial: Mapping[str, Any]) -> str:
    if trial["prefill"]:
        return f"{trial['prefill']} P + {trial['decode']} D"
    return f"{trial['decode']} aggregated"


def _kind(search: Mapping[str, Any]) -> str:
    kind = "apart" if search["apart"] else f"aggregated, steps of {search['step_tokens']}"
    return f"{kind}, {search['gpus_per_worker']} GPUs a worker"
