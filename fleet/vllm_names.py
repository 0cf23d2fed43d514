"""vLLM's names for those of our figures that mean the same, so that dashboards made for it work. Pure.

Figures of requests are told by the router, figures of engines by the workers: no sum counts one twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet.metrics import Buckets, Family, Labels, add


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    """Without `_total`."""
    of: str
    only: Mapping[str, str] = field(default_factory=dict)
    """Series with these label values, which the alias has no labels for."""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By label: our value → vLLM's. Others are left out."""


RENAMED = {"model": "model_name", "end": "finished_reason"}
"""Our label → vLLM's."""

ALIASES = (
    Alias("vllm:time_to_first_token_seconds", "pdfleet_time_to_first_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "pdfleet_inter_token_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "pdfleet_time_per_output_token_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "pdfleet_request_seconds"),
    Alias("vllm:request_queue_time_seconds", "pdfleet_stage_seconds", {"stage": "queue"}),
    Alias("vllm:request_prefill_time_seconds", "pdfleet_stage_seconds", {"stage": "prefill"}),
    Alias("vllm:request_decode_time_seconds", "pdfleet_stage_seconds", {"stage": "decode"}),
    Alias("vllm:prompt_tokens", "pdfleet_prompt_tokens"),
    Alias("vllm:generation_tokens", "pdfleet_generation_tokens"),
    Alias(
        "vllm:request_success",
        "pdfleet_requests_ended",
        values={
            "end": {
                "stop": "stop",
                "length": "length",
                "cancelled": "abort",
                "failed": "error",
                "timed_out": "error",
            }
        },
    ),
    Alias("vllm:num_requests_running", "pdfleet_worker_sequences", {"state": "running"}),
    Alias("vllm:num_requests_waiting", "pdfleet_worker_sequences", {"state": "waiting"}),
    Alias("vllm:kv_cache_usage_perc", "pdfleet_worker_blocks_used_ratio"),
    Alias("vllm:num_preemptions", "pdfleet_worker_preemptions"),
    Alias("vllm:prefix_cache_queries", "pdfleet_worker_prompt_tokens"),
    Alias("vllm:prefix_cache_hits", "pdfleet_worker_prefix_hit_tokens", {"tier": "device"}),
)


def aliases(families: Sequence[Family], model: str = "") -> list[Family]:
    """Those of the families that have one, once more under vLLM's name; with `model` as their model where
    they do not say which."""
    by_name = {family.name: family for family in families}
    found = [_as(alias, by_name[alias.of]) for alias in ALIASES if alias.of in by_name]
    named = RENAMED["model"]
    return [one if named in one.labels or not model else add([one], {named: model})[0] for one in found]


def _as(alias: Alias, family: Family) -> Family:
    series: dict[Labels, float | Buckets] = {}
    for key, number in family.series.items():
        shown = dict(zip(family.labels, key, strict=True))
        if any(shown.pop(name) != wanted for name, wanted in alias.only.items()):
            continue
        if any(shown[name] not in values for name, values in alias.values.items()):
            continue
        shown |= {name: values[shown[name]] for name, values in alias.values.items()}
        labels = tuple(shown.values())
        before = series.get(labels)
        if isinstance(number, Buckets) or before is None:
            series[labels] = number
        else:
            assert not isinstance(before, Buckets)
            series[labels] = before + number  # two of our ends are one of vLLM's
    names = tuple(RENAMED.get(name, name) for name in family.labels if name not in alias.only)
    return Family(alias.name, family.kind, f"vLLM's name for {family.name}.", names, series)
