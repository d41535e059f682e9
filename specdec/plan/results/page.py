"""A plan as tables, and as one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from specdec.commands.measuring.tables import Table
from specdec.plan.autoscaled import Day
from specdec.plan.found import Found
from specdec.plan.results.sweep import SweepPoint, Use
from specdec.plan.trial import Figures

_MOST_TENANTS, _MOST_RULES = 50, 6
_FIRST = 2
"""Tables before the assumptions: the deployment and its figures."""
_WORDS = 24
"""Characters from which a cell is text, which may be broken into lines."""
_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; border-bottom: 1px solid #ddd }
th, td { text-align: right } th:first-child, td:first-child, .words { text-align: left } td { white-space: nowrap }
.words { white-space: normal }
pre { background: #f4f4f4; padding: 1em; overflow: auto } svg { max-width: 100%; height: auto }
.note { color: #555 }
"""


def tables_of(
    found: Found, points: Sequence[SweepPoint], parts: Sequence[Use], scaled: Sequence[Day] = ()
) -> list[Table]:
    """Tables of the deployment, its figures, its curves, the parts that are full first, and what was tried.

    `scaled`: days with autoscaling.
    """
    return [
        _deployment(found),
        _figures(found),
        *([_curves(points)] if points else []),
        _parts(parts),
        *([_scaled(found, scaled)] if scaled else []),
        *([_tenants(found)] if len(found.figures.tenants) > 1 else []),
        _tried(found),
    ]


def _deployment(found: Found) -> Table:
    deployment = found.deployment
    table = Table("Deployment, predicted", ("part", "number", "each"))
    placement = deployment.placement
    ranks = (
        f"{placement.device.name}, {placement.num_ranks} ranks" if placement.num_ranks > 1 else placement.device.name
    )
    table.add("targets", deployment.num_targets, ranks)
    if placement.draft_device is not None:
        table.add("drafts", deployment.num_drafts, placement.draft_device.name)
    elif placement.is_together:
        table.add("drafts", 0, "in the targets")
    table.add("coordinators", deployment.num_coordinators, "a core")
    table.add("gateways", deployment.num_gateways, "a core")
    table.add("Redis", 0 if deployment.redis == "none" else 1, deployment.redis)
    table.add("dollars per hour", round(deployment.price, 2), "assumed prices")
    table.notes += found.notes
    return table


def _figures(found: Found) -> Table:
    columns = ("situation", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "served", "tokens/s")
    table = Table("Figures, predicted", columns)
    table.add("undisturbed", *_cells(found.figures))
    for scope, figures in found.with_loss.items():
        table.add(f"{scope} gone", *_cells(figures))
    if found.rolled is not None:
        table.add("rolling update", *_cells(found.rolled))
    table.notes.append(
        "Means of runs with other seeds, and half widths of their 95 % confidence intervals. An objective holds if the "
        "interval's worse end does."
    )
    if found.with_loss:
        table.notes.append("A loss is measured from when it is noticed: until then its streams stand still.")
    return table


def _cells(figures: Figures) -> list[str]:
    times = (figures.first_token_p50, figures.first_token_p99, figures.inter_token_p50, figures.inter_token_p99)
    return [*(each.text(1e3) for each in times), f"{figures.served.mean:.1%}", figures.tokens_per_s.text()]


def _curves(points: Sequence[SweepPoint]) -> Table:
    columns = ("speculation", "load", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "served", "tokens/s")
    table = Table("Load against latency, predicted", columns)
    for point in points:
        table.add(str(point.speculation), f"{point.factor:.0%}", *_cells(point.figures))
    return table


def _parts(parts: Sequence[Use]) -> Table:
    table = Table("What is full first", ("part", "full"))
    for part in parts:
        table.add(part.part, f"{part.share:.0%}")
    return table


def _scaled(found: Found, scaled: Sequence[Day]) -> Table:
    columns = ("sessionsPerReplica", "scaleDownStabilizationSeconds", "targets", "dollars per hour", "within both "
               "objectives", "served", "turns a day")  # fmt: skip
    table = Table("A day with autoscaling, predicted", columns)
    for day in scaled[:_MOST_RULES]:
        table.add(
            f"{day.rule.sessions_per_replica:g}",
            f"{day.rule.scale_down_stabilization_s:g}",
            day.targets.text(),
            round(day.price, 2),
            f"{day.good.mean:.1%}",
            f"{day.served.mean:.1%}",
            day.turns.text(),
        )
    deployment, rule = found.deployment, scaled[0].rule
    fixed = deployment.num_targets * deployment.placement.price
    table.notes.append(
        f"Between {rule.min_replicas} and {rule.max_replicas} targets; {deployment.num_targets} at all times cost "
        f"{fixed:.2f}. A target serves {rule.start_s:g} s after it was ordered. Turns: from more targets to fewer, or "
        "back; traffic itself turns twice."
    )
    if not scaled[0].holds:
        table.notes.append("No setting holds both objectives for 99 % of the requests: leave the number as it is.")
    return table


def _tenants(found: Found) -> Table:
    table = Table("Tenants, undisturbed", ("tenant", "tokens/s", "refused requests/s"))
    for tenant, (tokens, refused) in list(found.figures.tenants.items())[:_MOST_TENANTS]:
        table.add(tenant or "(none)", tokens.text(), refused.text())
    if (num := len(found.figures.tenants)) > _MOST_TENANTS:
        table.notes.append(f"The first {_MOST_TENANTS} of {num}.")
    return table


def _tried(found: Found) -> Table:
    table = Table("Kinds of replicas", ("kind", "targets at least", "targets that hold", "dollars per hour", "why not"))
    for each in found.tried:
        table.add(each.label, each.least or None, each.num_targets, each.price or None, each.why_not)
    table.notes.append(
        "At least: by throughput alone, and two where a loss is to be borne. That hold: by rough trials, but for the "
        "plan's kind. Dollars: of targets and drafts, for the number to the left."
    )
    return table


def page(title: str, assumptions: Sequence[str], tables: Sequence[Table], plots: Mapping[str, str], values: str) -> str:
    """The page: no script, and nothing from elsewhere. First what to deploy and what that does, as readers ask."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<p><b>Predictions by simulation, not measurements.</b></p>",
        *(_html(table) for table in tables[:_FIRST]),
        "<h2>Assumptions</h2>",
        "<ul>",
        *(f"<li>{escape(each)}</li>" for each in assumptions),
        "</ul>",
        *plots.values(),
        *(_html(table) for table in tables[_FIRST:]),
        "<h2>Values for the chart</h2>",
        f"<pre>{escape(values)}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _cell(text: str) -> str:
    is_words = len(text) >= _WORDS and not text[0].isdigit()
    return f'<td class="words">{escape(text)}</td>' if is_words else f"<td>{escape(text)}</td>"


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return f"<h2>{escape(table.title)}</h2><table><tr>{head}</tr>{rows}</table>{notes}"
