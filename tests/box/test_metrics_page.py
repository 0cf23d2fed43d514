"""docs/metrics.md names every figure that is told, with its labels and meaning, and no other.

`python tests/box/test_metrics_page.py` writes its tables anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from told import told_by_router, told_by_worker

from fleet.metrics import Family, Kind
from fleet.vllm_names import ALIASES, RENAMED

COUNTED = "docs/counters.md."
"""What the meaning of a counter ends with that is kept, and told, under its own name."""
PAGE = Path(__file__).parents[2] / "docs/metrics.md"


ALL_COUNTERS = (
    "| `pdfleet_worker_NAME_total` | counter | | each other counter of [counters.md](counters.md) |\n"
)


def rows(families: Iterable[Family]) -> str:
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda family: family.name):
        if family.help.endswith(COUNTED):
            continue  # One row for all, or whoever adds a counter would have two tables to keep.
        name = f"{family.name}_total" if family.kind is Kind.COUNTER else family.name
        lines.append(f"| `{name}` | {family.kind} | {', '.join(family.labels)} | {family.help} |")
    return "\n".join(lines) + "\n"


def names() -> str:
    lines = ["| vLLM's | of | where |", "|---|---|---|"]
    for alias in ALIASES:
        only = ", ".join(f"{label}={value}" for label, value in alias.only.items())
        lines.append(f"| `{alias.name}` | `{alias.of}` | {only} |")
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    return {
        "router": rows(told_by_router()),
        "worker": rows(told_by_worker()) + ALL_COUNTERS,
        "vllm": names(),
    }


def between(name: str, text: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, _, rest = text.partition(begin)
    middle, _, after = rest.partition(end)
    return before + begin, middle, end + after


def test_the_page_has_every_figure_and_no_other() -> None:
    text = PAGE.read_text()
    for name, table in tables().items():
        assert between(name, text)[1] == table, f"run: python {__file__}"


def test_every_counter_of_a_worker_has_its_line() -> None:
    counters = (PAGE.parent / "counters.md").read_text()
    for family in told_by_worker():
        if family.help.endswith(COUNTED):
            assert f"`{family.name.removeprefix('pdfleet_worker_')}`" in counters, family.name


def test_names_are_as_prometheus_wants_them() -> None:
    told = {family.name: family for family in (*told_by_router(), *told_by_worker())}
    for name, family in told.items():
        assert name.startswith("pdfleet_")
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), "the writer adds these"
        assert family.kind is not Kind.HISTOGRAM or name.endswith(("_seconds", "_sequences", "_tokens")), name
        assert len(family.labels) <= 5
        assert family.help
    for alias in ALIASES:
        assert {*alias.only, *alias.values} <= {*told[alias.of].labels}, alias.name
    assert set(RENAMED) == {"model", "end"}


def main() -> None:
    text = PAGE.read_text()
    for name, table in tables().items():
        before, _, after = between(name, text)
        text = before + table + after
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
