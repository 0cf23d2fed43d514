"""What the dashboards show: rows of panels, each with the PromQL of its lines.

All read the names of docs/metrics.md and the recorded ones of prometheus/rules.yml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Lines:
    """A panel: lines over time, or with `now` their last values as figures."""

    title: str
    queries: Sequence[tuple[str, str]]
    """(expression, legend)."""
    unit: str = "short"
    why: str = ""
    span: int = 8
    stacked: bool = False
    now: bool = False
    most: float | None = None


@dataclass(frozen=True)
class Page:
    name: str
    title: str
    rows: Sequence[tuple[str, Sequence[Lines]]]
    variables: Sequence[tuple[str, str]] = field(default=())
    """(name, PromQL of its values), beside the data source."""


CLASS = ("slo_class", "label_values(pdfleet_requests_received_total, slo_class)")
WORKER = ("worker", "label_values(pdfleet_worker_info, worker)")
PER = "$__rate_interval"
WANTED = 'slo_class=~"$slo_class"'
BUSY = f"avg by (role) (sum by (role, worker) (rate(pdfleet_worker_step_seconds_sum[{PER}])))"
STEPS = "rate(pdfleet_worker_step_seconds_count"
WITH_PROMPTS = f'sum by (role) ({STEPS}{{kind="prompt"}}[{PER}])) / sum by (role) ({STEPS}[{PER}]))'
ONE = 'worker=~"$worker"'


def rate(name: str, by: str = "", matching: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({name}{{{matching}}}[{PER}]))" if matching else f"{grouped}(rate({name}[{PER}]))"


def quantiles(name: str, matching: str = "", by: str = "") -> list[tuple[str, str]]:
    """p50, p90 and p99 of a histogram: never a mean alone."""
    labels, shown = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return [
        (
            f"histogram_quantile({share}, {rate(f'{name}_bucket', labels, matching)})",
            f"p{share * 100:.0f}{shown}",
        )
        for share in (0.5, 0.9, 0.99)
    ]


def quantile(share: float, name: str, by: str, matching: str = "") -> tuple[str, str]:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', f'le, {by}', matching)})", f"{{{{{by}}}}}"


def _forecast(title: str, short: str, long: str) -> Lines:
    """What was forecast of requests beside what came to pass."""
    actual, _ = quantile(0.5, f"pdfleet_{long}_seconds", "slo_class", WANTED)
    return Lines(
        f"{title}, forecast and actual, median",
        [
            quantile(0.5, f"pdfleet_{short}_forecast_seconds", "slo_class", WANTED),
            (actual, "{{slo_class}} actual"),
        ],
        "s",
    )


OVERVIEW = Page(
    "overview",
    "pdfleet: overview",
    [
        (
            "Now",
            [
                Lines(
                    "Attainment, 5 min",
                    [("pdfleet:attainment:ratio5m", "{{slo_class}}")],
                    "percentunit",
                    span=4,
                    now=True,
                    most=1.0,
                    why="Share of requests that met every objective of their class.",
                ),
                Lines(
                    "Goodput, 5 min",
                    [("sum(pdfleet:goodput:rate5m)", "")],
                    "reqps",
                    span=4,
                    now=True,
                    why="Requests a second that met every objective.",
                ),
                Lines("In flight", [("sum(pdfleet_requests_in_flight)", "")], span=4, now=True),
                Lines("Waiting at routers", [("sum(pdfleet_router_queue)", "")], span=4, now=True),
                Lines(
                    "Usable workers",
                    [("max by (role) (sum by (role, instance) (pdfleet_router_worker_usable))", "{{role}}")],
                    span=4,
                    now=True,
                    why="As the router that sees most of them sees it.",
                ),
                Lines(
                    "Targets that do not answer",
                    [('count(up{job=~"pdfleet.*"} == 0) or vector(0)', "")],
                    span=4,
                    now=True,
                ),
            ],
        ),
        (
            "Requests",
            [
                Lines(
                    "Requests by end",
                    [(rate("pdfleet_requests_ended_total", "end"), "{{end}}")],
                    "reqps",
                    stacked=True,
                ),
                Lines(
                    "Received and attained",
                    [
                        (rate("pdfleet_requests_received_total"), "received"),
                        (rate("pdfleet_requests_judged_total", matching='verdict="attained"'), "attained"),
                    ],
                    "reqps",
                ),
                Lines(
                    "Refused, failed over, shed",
                    [(rate("pdfleet_router_events_total", "event"), "{{event}}")],
                    "reqps",
                ),
                Lines("Time to first token", quantiles("pdfleet_time_to_first_token_seconds"), "s"),
                Lines("Between two tokens", quantiles("pdfleet_inter_token_seconds"), "s"),
                Lines("Whole request", quantiles("pdfleet_request_seconds"), "s"),
                Lines(
                    "Tokens",
                    [
                        (rate("pdfleet_prompt_tokens_total"), "prompt"),
                        (rate("pdfleet_cached_tokens_total"), "of them cached"),
                        (rate("pdfleet_generation_tokens_total"), "generated"),
                    ],
                    "short",
                ),
                Lines(
                    "HTTP by outcome",
                    [(rate("pdfleet_http_requests_total", "outcome"), "{{outcome}}")],
                    "reqps",
                ),
                Lines(
                    "Errors by name", [(rate("pdfleet_requests_failed_total", "error"), "{{error}}")], "reqps"
                ),
            ],
        ),
        (
            "Routers",
            [
                Lines("Prefix index", [("max(pdfleet_router_index_blocks)", "blocks")]),
                Lines(
                    "Workers whose blocks are not proven",
                    [("max by (instance) (pdfleet_router_index_unproven)", "{{instance}}")],
                ),
                Lines(
                    "CPU of routers",
                    [
                        (
                            'rate(process_cpu_seconds_total{job="pdfleet-routers"}[$__rate_interval])',
                            "{{instance}}",
                        )
                    ],
                    "percentunit",
                ),
            ],
        ),
    ],
)

OBJECTIVES = Page(
    "objectives",
    "pdfleet: objectives and goodput",
    [
        (
            "Attainment",
            [
                Lines(
                    "Attainment",
                    [
                        (f"pdfleet:attainment:ratio5m{{{WANTED}}}", "{{slo_class}} 5 min"),
                        (f"pdfleet:attainment:ratio1h{{{WANTED}}}", "{{slo_class}} 1 h"),
                    ],
                    "percentunit",
                    most=1.0,
                ),
                Lines(
                    "Burn rate of the budget",
                    [
                        (f"pdfleet:burn:rate5m{{{WANTED}}}", "{{slo_class}} 5 min"),
                        (f"pdfleet:burn:rate1h{{{WANTED}}}", "{{slo_class}} 1 h"),
                        (f"pdfleet:burn:rate6h{{{WANTED}}}", "{{slo_class}} 6 h"),
                    ],
                    why="1 uses the budget up exactly; alerts: 14.4 (5 min and 1 h), 6 (30 min and 6 h).",
                ),
                Lines("Goodput", [(f"pdfleet:goodput:rate5m{{{WANTED}}}", "{{slo_class}}")], "reqps"),
                Lines(
                    "What was missed",
                    [(rate("pdfleet_objectives_missed_total", "reason", WANTED), "{{reason}}")],
                    "reqps",
                    stacked=True,
                ),
                Lines(
                    "Verdicts",
                    [(rate("pdfleet_requests_judged_total", "verdict", WANTED), "{{verdict}}")],
                    "reqps",
                    stacked=True,
                ),
                Lines(
                    "Called for",
                    [(f"max by (slo_class) (pdfleet_burning{{{WANTED}}})", "{{slo_class}}")],
                    why="1: a router by itself sees both windows of a pair burn too fast.",
                ),
            ],
        ),
        (
            "As clients see it",
            [
                Lines(
                    "Time to first token",
                    quantiles("pdfleet_time_to_first_token_seconds", WANTED, "slo_class"),
                    "s",
                ),
                Lines(
                    "Time per output token",
                    quantiles("pdfleet_time_per_output_token_seconds", WANTED, "slo_class"),
                    "s",
                ),
                Lines("Whole request", quantiles("pdfleet_request_seconds", WANTED, "slo_class"), "s"),
            ],
        ),
        (
            "Admission",
            [
                _forecast("Time to first token", "ttft", "time_to_first_token"),
                _forecast("Time per output token", "tpot", "time_per_output_token"),
                Lines(
                    "How far off, p90",
                    [
                        (
                            quantile(0.9, f"pdfleet_{name}_forecast_error_seconds", "direction", WANTED)[0],
                            f"{name} {{{{direction}}}}",
                        )
                        for name in ("ttft", "tpot")
                    ],
                    "s",
                ),
                Lines(
                    "Waiting by class",
                    [(f"sum by (slo_class) (pdfleet_router_queue{{{WANTED}}})", "{{slo_class}}")],
                    stacked=True,
                ),
            ],
        ),
    ],
    [CLASS],
)

BALANCE = Page(
    "balance",
    "pdfleet: prefill and decode",
    [
        (
            "Where requests wait",
            [
                Lines(
                    "Parts of a request's life, p90",
                    [quantile(0.9, "pdfleet_stage_seconds", "stage")],
                    "s",
                    span=12,
                ),
                Lines(
                    "Why workers were chosen",
                    [(rate("pdfleet_router_decisions_total", "reason"), "{{reason}}")],
                    "reqps",
                    span=12,
                ),
            ],
        ),
        (
            "Load",
            [
                Lines("Queued prompt tokens", [("sum by (role) (pdfleet_worker_queued_tokens)", "{{role}}")]),
                Lines(
                    "Sequences", [("sum by (role, state) (pdfleet_worker_sequences)", "{{role}} {{state}}")]
                ),
                Lines(
                    "Busy",
                    [
                        (
                            BUSY,
                            "{{role}}",
                        )
                    ],
                    "percentunit",
                    why="Share of time in engine steps, of the average worker of a role.",
                ),
                Lines(
                    "KV blocks that could not be had at once",
                    [("avg by (role) (pdfleet_worker_blocks_used_ratio)", "{{role}}")],
                    "percentunit",
                    most=1.0,
                ),
                Lines(
                    "Speed of prefill",
                    [("sum by (role) (pdfleet_worker_prefill_tokens_per_second)", "{{role}}")],
                ),
                Lines(
                    "A decode step, p50 and p99",
                    [
                        (
                            quantile(share, "pdfleet_worker_step_seconds", "role", 'kind="decode"')[0],
                            f"p{share * 100:.0f} {{{{role}}}}",
                        )
                        for share in (0.5, 0.99)
                    ],
                    "s",
                ),
            ],
        ),
        (
            "Steps",
            [
                Lines(
                    "Steps with prompts among all",
                    [
                        (
                            WITH_PROMPTS,
                            "{{role}}",
                        )
                    ],
                    "percentunit",
                    most=1.0,
                ),
                Lines("Sequences in a step, p50", [quantile(0.5, "pdfleet_worker_step_sequences", "role")]),
                Lines("Preemptions", [(rate("pdfleet_worker_preemptions_total", "role"), "{{role}}")], "ops"),
            ],
        ),
    ],
)

TRANSFER = Page(
    "transfer",
    "pdfleet: KV transfer",
    [
        (
            "Hand-offs",
            [
                Lines(
                    "Hand-offs by outcome",
                    [(rate("pdfleet_handoffs_total", "outcome"), "{{outcome}}")],
                    "ops",
                ),
                Lines(
                    "Waited for KV, as the request sees it",
                    quantiles("pdfleet_stage_seconds", 'stage="transfer"'),
                    "s",
                ),
                Lines(
                    "First to second token", quantiles("pdfleet_stage_seconds", 'stage="second_token"'), "s"
                ),
            ],
        ),
        (
            "Bytes",
            [
                Lines(
                    "Brought", [(rate("pdfleet_worker_pulled_bytes_total", "worker"), "{{worker}}")], "Bps"
                ),
                Lines("Served", [(rate("pdfleet_worker_served_bytes_total", "worker"), "{{worker}}")], "Bps"),
                Lines("A pull", quantiles("pdfleet_worker_pull_seconds"), "s"),
            ],
        ),
        (
            "What goes wrong",
            [
                Lines(
                    "Failures",
                    [
                        (rate("pdfleet_worker_pull_failures_total"), "pulls failed"),
                        (rate("pdfleet_worker_checksum_mismatches_total"), "blocks of a wrong checksum"),
                        (rate("pdfleet_worker_refused_reads_total"), "reads refused"),
                        (rate("pdfleet_worker_leases_expired_total"), "leases run out"),
                    ],
                    "ops",
                ),
                Lines(
                    "Computed again instead",
                    [(rate("pdfleet_worker_pulls_recomputed_total", "worker"), "{{worker}}")],
                    "ops",
                ),
                Lines("Leases that stand", [("sum by (worker) (pdfleet_worker_leases)", "{{worker}}")]),
            ],
        ),
        (
            "What need not be moved",
            [
                Lines(
                    "Prompt tokens at decode workers",
                    [
                        (rate("pdfleet_worker_pulled_tokens_total"), "brought"),
                        (rate("pdfleet_worker_pull_hit_tokens_total"), "were there already"),
                    ],
                    "short",
                ),
                Lines(
                    "Early",
                    [
                        (rate("pdfleet_worker_early_reservations_total"), "reservations"),
                        (rate("pdfleet_worker_pulled_early_blocks_total"), "blocks"),
                    ],
                    "ops",
                ),
                Lines("Connections opened", [(rate("pdfleet_worker_connections_opened_total"), "")], "ops"),
            ],
        ),
    ],
)

ONE_WORKER = Page(
    "worker",
    "pdfleet: one worker",
    [
        (
            "Work",
            [
                Lines("Sequences", [(f"sum by (state) (pdfleet_worker_sequences{{{ONE}}})", "{{state}}")]),
                Lines(
                    "Jobs by end", [(rate("pdfleet_worker_jobs_ended_total", "end", ONE), "{{end}}")], "ops"
                ),
                Lines("Queued prompt tokens", [(f"sum(pdfleet_worker_queued_tokens{{{ONE}}})", "")]),
                Lines(
                    "Tokens",
                    [
                        (rate("pdfleet_worker_computed_tokens_total", matching=ONE), "computed"),
                        (rate("pdfleet_worker_generated_tokens_total", matching=ONE), "generated"),
                        (rate("pdfleet_worker_recomputed_tokens_total", matching=ONE), "computed again"),
                    ],
                    "short",
                ),
                Lines(
                    "Prefix hits",
                    [
                        (rate("pdfleet_worker_prefix_hit_tokens_total", "tier", ONE), "{{tier}}"),
                        (rate("pdfleet_worker_prompt_tokens_total", matching=ONE), "of prompt tokens"),
                    ],
                    "short",
                ),
                Lines("Stalled", [(f"max(pdfleet_worker_stalled_seconds{{{ONE}}})", "")], "s"),
            ],
        ),
        (
            "Steps",
            [
                Lines("Step", quantiles("pdfleet_worker_step_seconds", ONE, "kind"), "s"),
                Lines("Sequences in a step", quantiles("pdfleet_worker_step_sequences", ONE)),
                Lines("Tokens in a step", quantiles("pdfleet_worker_step_tokens", ONE)),
            ],
        ),
        (
            "Memory",
            [
                Lines(
                    "Blocks by state",
                    [(f"sum by (state) (pdfleet_worker_blocks{{{ONE}}})", "{{state}}")],
                    stacked=True,
                ),
                Lines(
                    "Evictions and preemptions",
                    [
                        (rate("pdfleet_worker_block_evictions_total", matching=ONE), "evicted"),
                        (rate("pdfleet_worker_preemptions_total", matching=ONE), "preempted"),
                    ],
                    "ops",
                ),
                Lines("Resident", [(f"process_resident_memory_bytes{{{ONE}}}", "{{worker}}")], "bytes"),
                Lines(
                    "CPU", [(f"rate(process_cpu_seconds_total{{{ONE}}}[{PER}])", "{{worker}}")], "percentunit"
                ),
                Lines("Open files", [(f"process_open_fds{{{ONE}}}", "{{worker}}")]),
                Lines(
                    "Full collections",
                    [(f'rate(python_gc_collections_total{{{ONE}, generation="2"}}[{PER}])', "{{worker}}")],
                    "ops",
                ),
            ],
        ),
    ],
    [WORKER],
)

PAGES = (OVERVIEW, OBJECTIVES, BALANCE, TRANSFER, ONE_WORKER)


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of every panel."""
    return [
        (f"{page.name}: {panel.title}", expression)
        for page in PAGES
        for _, panels in page.rows
        for panel in panels
        for expression, _ in panel.queries
    ]
