"""Makes the JSON of Grafana dashboards from short descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 39
GRID_WIDTH = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "table": 6}
_RUNBOOKS = "docs/operations.md"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Args:
        text: Meaning of the values, and how to read them.
        queries: PromQL by legend; Grafana replaces `{{label}}` in a legend.
        unit: One of Grafana's units, such as s, percentunit, reqps, short.
        width: Columns, of 24.
        steps: Colours from a value upwards, ascending; the first colour holds below. A time series has a line at each.
        alert: The alert whose runbook applies to bad values.
        words: Texts shown in place of values.
    """

    title: str
    text: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: Literal["stat", "timeseries", "table"] = "timeseries"
    width: int = 8
    steps: Sequence[tuple[float | None, str]] = ((None, "text"),)
    alert: str = ""
    words: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A titled group of panels."""

    title: str
    panels: Sequence[Panel]


def dashboard(
    uid: str, title: str, text: str, rows: Sequence[Row], instance_metric: str | None = None
) -> dict[str, Any]:
    """Return a dashboard's JSON, with a variable `namespace`; outside Kubernetes it has only the value All.

    Args:
        instance_metric: Adds a variable `instance` with the instances that export this metric.
    """
    return {
        "annotations": {"list": []},
        "description": text,
        "editable": False,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [
            {
                "asDropdown": False,
                "icon": "external link",
                "includeVars": False,
                "keepTime": True,
                "tags": ["specdec"],
                "targetBlank": False,
                "title": "specdec",
                "tooltip": "",
                "type": "dashboards",
                "url": "",
            }
        ],
        "panels": _place(rows),
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["specdec"],
        "templating": {"list": _variables(instance_metric)},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": title,
        "uid": uid,
        "version": 1,
        "weekStart": "",
    }


def _variables(instance_metric: str | None) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [
        {
            "hide": 0,
            "includeAll": False,
            "label": "Data source",
            "multi": False,
            "name": "datasource",
            "options": [],
            "query": "prometheus",
            "refresh": 1,
            "regex": "",
            "type": "datasource",
        }
    ]
    variables.append(_label_variable("namespace", "specdec_build_info"))
    if instance_metric is not None:
        variables.append(_label_variable("instance", f'{instance_metric}{{namespace=~"$namespace"}}'))
    return variables


def _label_variable(label: str, selector: str) -> dict[str, Any]:
    """A variable with a label's values. All is `.*`, which also matches series without the label."""
    query = f"label_values({selector}, {label})"
    return {
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": _DATASOURCE,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": label.capitalize(),
        "multi": True,
        "name": label,
        "options": [],
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "type": "query",
    }


def _place(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Place the panels of rows from left to right and from top to bottom, and number them."""
    placed: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        header = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top}
        number = len(placed) + 1
        placed.append(
            {"collapsed": False, "gridPos": header, "id": number, "panels": [], "title": row.title, "type": "row"}
        )
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > GRID_WIDTH:
                top, left, height = top + height, 0, 0
            place = {"h": _HEIGHTS[panel.kind], "w": panel.width, "x": left, "y": top}
            placed.append(_panel(panel, len(placed) + 1, place))
            left += panel.width
            height = max(height, _HEIGHTS[panel.kind])
        top += height
    return placed


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    is_instant = panel.kind != "timeseries"
    return {
        "datasource": _DATASOURCE,
        "description": panel.text + (f" Runbook: {_RUNBOOKS}#{panel.alert.lower()}." if panel.alert else ""),
        "fieldConfig": {
            "defaults": {
                "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
                "custom": _custom(panel),
                "mappings": _mappings(panel),
                # The axis starts at 0, or small changes would look large.
                **({"min": 0} if panel.kind == "timeseries" else {}),
                "thresholds": {
                    "mode": "absolute",
                    "steps": [{"color": color, "value": value} for value, color in panel.steps],
                },
                "unit": panel.unit,
            },
            "overrides": [],
        },
        "gridPos": place,
        "id": number,
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "datasource": _DATASOURCE,
                "editorMode": "code",
                "expr": expr,
                "format": "table" if panel.kind == "table" else "time_series",
                "instant": is_instant,
                "legendFormat": legend,
                "range": not is_instant,
                "refId": chr(ord("A") + index),
            }
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
        "title": panel.title,
        "transformations": _TRANSFORMATIONS[panel.kind],
        "type": panel.kind,
    }


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    has_lines = len(panel.steps) > 1
    return {
        "fillOpacity": 10,
        "showPoints": "never",
        "thresholdsStyle": {"mode": "dashed" if has_lines else "off"},
    }


def _mappings(panel: Panel) -> list[dict[str, Any]]:
    mappings: list[dict[str, Any]] = []
    if panel.words:
        words = {str(value): {"index": index, "text": text} for index, (value, text) in enumerate(panel.words.items())}
        mappings.append({"options": words, "type": "value"})
    if panel.kind == "stat":  # without traffic a ratio is NaN
        quiet = {"match": "null+nan", "result": {"color": "text", "index": len(panel.words), "text": "no traffic"}}
        mappings.append({"options": quiet, "type": "special"})
    return mappings


_TRANSFORMATIONS: dict[str, list[dict[str, Any]]] = {
    "stat": [],
    "timeseries": [],
    "table": [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": {"Value": "processes"}}},
    ],
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "timeseries": {
        "legend": {"calcs": ["mean", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "table": {"cellHeight": "sm", "showHeader": True},
}
