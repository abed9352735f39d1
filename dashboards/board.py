"""From panels as data to Grafana's JSON: ids, places, links and defaults in one pass."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

from shim.telemetry import catalog
from shim.telemetry.catalog import ShimState
from shim.verdict import ReasonClass, reasons_of

from . import links
from . import queries as q
from .panels import COLUMNS, Board, Kind, Panel, Placed, Unit, place

SOURCE = shapes.DataSourceRef(type_val="prometheus", uid="${datasource}")
STATE_COLOURS = {ShimState.ACTIVE: "green", ShimState.DISABLED: "yellow"}


def render(board: Board) -> str:
    """The dashboard's JSON, ending in a newline; the same input gives the same bytes."""
    dashboard = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["vllm", "kv-shim"])
        .time("now-1h", "now")
        .refresh("30s" if board.variables else "")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .links([_link_to(uid, title) for uid, title in _OTHERS if uid != board.uid])
    )
    if board.variables:
        dashboard.variables(_variables(one_instance=board.one_instance)).annotations(_annotations())
    top = 0
    for row in board.rows:
        heading = models.GridPos(h=1, w=COLUMNS, x=0, y=top)
        dashboard.with_row(builders.Row(row.title).id(links.entry_id(f"row {row.title}")).grid_pos(heading))
        placed, top = place(row, top)
        for item in placed:
            dashboard.with_panel(_panel(item))
    # Through plain JSON and sorted: the SDK's own order of keys is no promise.
    plain = json.loads(JSONEncoder().encode(dashboard.build()))
    _show_links(plain)
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _show_links(dashboard: dict[str, Any]) -> None:
    """The SDK (0.0.21) always writes the placement that hides links and annotations in a menu: take it out."""
    owners = [dashboard, *dashboard["panels"]]
    for item in (
        *(link for o in owners for link in o.get("links", ())),
        *dashboard["annotations"].get("list", ()),
    ):
        item.pop("placement", None)


_OTHERS = (
    (links.FLEET_UID, "Fleet"),
    (links.INSTANCE_UID, "Instance"),
    (links.RUNBOOK_UID, "Runbook"),
)


def _link_to(uid: str, title: str) -> builders.DashboardLink:
    link = builders.DashboardLink(title).type(models.DashboardLinkType.LINK).url(f"/d/{uid}").icon("dashboard")
    return link.keep_time(keep_time=True).include_vars(include_vars=True).tooltip(f"vLLM KV shim: {title}")


def _data_link(title: str, url: str) -> dict[str, Any]:
    return {"title": title, "url": url}


def _variables(*, one_instance: bool) -> list[Any]:
    variables: list[Any] = [
        builders.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        builders.DatasourceVariable("traces").label("Traces").type("tempo"),
    ]
    narrower: list[str] = []
    for name, label in (
        ("cluster", "Cluster"),
        ("namespace", "Namespace"),
        ("job", "Job"),
        ("role", "Role"),
        ("model_name", "Model"),
        ("instance", "Instance"),
        ("engine", "Engine"),
    ):
        # A stock gauge, not one of ours: a server without the shim is to be found here too.
        query = f"label_values({q.STOCK_RUNNING}{{{','.join(narrower)}}}, {name})"
        one = one_instance and name == "instance"
        variable = (
            builders.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query({"query": query, "refId": f"variable-{name}", "qryType": 1})
            .definition(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.NATURAL_ASC)
            .multi(not one)
            .include_all(not one)
        )
        if not one:
            # Matches series without the label as well: not every fleet has a cluster or a namespace.
            variable.all_value(".*").current(models.VariableOption(selected=True, text="All", value="$__all"))
        variables.append(variable)
        narrower.append(f'{name}=~"${name}"')
    return variables


def _annotations() -> list[Any]:
    where = ",".join(q.SELECTED.matchers)
    return [
        builders.AnnotationQuery()
        .name("Restarts")
        .datasource(SOURCE)
        .enable(enable=True)
        .icon_color("blue")
        .expr(f"{q.series(catalog.START_TIME_SECONDS, q.SELECTED)} * 1000")
        .use_value_for_time(use_value_for_time=True)
        .title_format("{{instance}} started")
        .text_format("{{role}} {{job}}")
        .step("60s"),
        builders.AnnotationQuery()
        .name("Firing alerts")
        .datasource(SOURCE)
        .enable(enable=True)
        .icon_color("red")
        .expr(f'ALERTS{{alertname=~"KVShim.+",alertstate="firing",{where}}}')
        .title_format("{{alertname}}")
        .text_format("{{severity}} {{job}} {{instance}} {{reason}}")
        .step("60s"),
    ]


def _panel(placed: Placed) -> Any:  # one branch a kind of panel, nothing nested  # noqa: C901, PLR0912  # one branch a kind of panel, nothing nested
    panel = placed.panel
    made: Any
    if panel.kind is Kind.STAT:
        made = stat.Panel().color_mode(shapes.BigValueColorMode.BACKGROUND_SOLID)
        made.graph_mode(shapes.BigValueGraphMode.NONE).reduce_options(
            common.ReduceDataOptions().calcs(["lastNotNull"])
        )
    elif panel.kind is Kind.TIME:
        made = _time_panel(panel)
    elif panel.kind is Kind.TABLE:
        made = table.Panel().cell_height(shapes.TableCellHeight.SM)
        _table(made, panel)
    elif panel.kind is Kind.BARS:
        made = bargauge.Panel().orientation(shapes.VizOrientation.HORIZONTAL)
        made.display_mode(shapes.BarGaugeDisplayMode.BASIC)
        made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        made = text.Panel().mode(TextMode.MARKDOWN).content(panel.markdown)
    made.id(links.entry_id(panel.title)).title(panel.title).description(panel.description)
    made.grid_pos(models.GridPos(h=panel.height, w=panel.width, x=placed.x, y=placed.y))
    if panel.kind is Kind.TEXT:
        return made
    steps = [models.Threshold(None, panel.base), *(models.Threshold(v, c) for v, c in panel.thresholds)]
    made.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    made.datasource(SOURCE).unit(panel.unit.value)
    if panel.unit is Unit.SHARE:
        made.min(0).max(1)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    if panel.no_value:
        made.no_value(panel.no_value)
    if panel.runbook:
        link = builders.DashboardLink(f"Runbook: {panel.runbook}").type(models.DashboardLinkType.LINK)
        made.links([link.url(links.runbook_path(panel.runbook)).icon("doc")])
    if panel.traces:
        made.data_links([_as_link("Traces", links.traces_path(panel.traces))])
    if panel.by_reason:
        _link_reasons(made, panel)
    for index, query in enumerate(panel.queries):
        made.with_target(_target(panel, query, chr(ord("A") + index)))
    return made


def _as_link(title: str, url: str) -> builders.DashboardLink:
    return builders.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url)


def _target(panel: Panel, query: Any, ref: str) -> Any:
    target = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(SOURCE)
    if query.legend:
        target.legend_format(query.legend)
    if panel.kind is Kind.TIME:
        return target.range()
    target.instant()
    if panel.kind is Kind.TABLE:
        target.format(PromQueryFormat.TABLE)
    return target


def _time_panel(panel: Panel) -> Any:
    legend = common.VizLegendOptions().display_mode(shapes.LegendDisplayMode.LIST)
    legend.placement(shapes.LegendPlacement.BOTTOM).show_legend(show_legend=True)
    tooltip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING)
    made = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).min(0)
    made.fill_opacity(60 if panel.stack else 8)
    if panel.stack:
        made.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    if panel.thresholds:
        made.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED),
        )
    return made


def _table(made: Any, panel: Panel) -> None:
    order = {label: index for index, (label, _) in enumerate(panel.columns)}
    names = dict(panel.columns)
    made.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, "Value": True},
                "indexByName": order,
                "renameByName": names,
            },
        )
    )
    if "state" in names:
        mapping = {
            "type": "value",
            "options": {
                str(state): {"color": c, "index": i} for i, (state, c) in enumerate(STATE_COLOURS.items())
            },
        }
        made.override_by_name(
            names["state"],
            [
                models.DynamicConfigValue("mappings", [mapping]),
                models.DynamicConfigValue("custom.cellOptions", {"type": "color-background"}),
            ],
        )
    if "instance" in names:
        url = f"/d/{links.INSTANCE_UID}?var-instance=${{__value.raw}}&{links.KEEP}"
        made.override_by_name(
            names["instance"], [models.DynamicConfigValue("links", [_data_link("This instance", url)])]
        )


def _link_reasons(made: Any, panel: Panel) -> None:
    for reason in reasons_of(ReasonClass.OPERATOR, ReasonClass.CLIENT, ReasonClass.INTENDED):
        found = [_data_link(f"Runbook: {reason}", links.runbook_path(reason))]
        if panel.traces:
            found.append(_data_link("Traces", links.traces_path(panel.traces)))
        made.override_by_name(reason.value, [models.DynamicConfigValue("links", found)])
