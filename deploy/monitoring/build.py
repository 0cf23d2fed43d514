"""Builds the dashboards from panels.py: `python deploy/monitoring/build.py`; `--check` says what is old."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)
from panels import PAGES, Lines, Page

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def dashboard_of(page: Page) -> str:
    """Its JSON, as Grafana imports it."""
    built = (
        dashboard.Dashboard(page.title)
        .uid(f"pdfleet-{page.name}")
        .tags(["pdfleet"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    )
    for name, values in page.variables:
        built = built.with_variable(
            dashboard.QueryVariable(name)
            .datasource(SOURCE)
            .query(values)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    for title, panels in page.rows:
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def _panel(lines: Lines) -> stat.Panel | timeseries.Panel:
    panel: stat.Panel | timeseries.Panel
    if lines.now:
        panel = stat.Panel().graph_mode(BigValueGraphMode.AREA).height(4)
    else:
        panel = (
            timeseries.Panel()
            .height(8)
            .fill_opacity(10)
            .legend(
                common.VizLegendOptions()
                .display_mode(LegendDisplayMode.LIST)
                .placement(LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
            .min(0)
        )
        if lines.stacked:
            panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    panel = (
        panel.title(lines.title).description(lines.why).unit(lines.unit).span(lines.span).datasource(SOURCE)
    )
    if lines.most is not None:
        panel = panel.max(lines.most)
    for number, (expression, legend) in enumerate(lines.queries):
        panel = panel.with_target(
            prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(expression).legend_format(legend)
        )
    return panel


def main() -> int:
    old = []
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        path, made = FOLDER / f"{page.name}.json", dashboard_of(page)
        if path.exists() and path.read_text() == made:
            continue
        old.append(path.name)
        if "--check" not in sys.argv:
            path.write_text(made)
    print(f"changed: {', '.join(old)}" if old else "all dashboards are current")
    return 1 if old and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
