"""An explanation as one HTML file without scripts or external files, with a picture of every step's tree."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape

from specdec.commands.debug.steps import ROOT, Explained, ExplainedNode, ExplainedStep, State

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color: #1d2430; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.output { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, monospace;
  background: #f5f6f8; padding: .8rem; border-radius: 6px; }
.output .draft { background: #cdeed6; } .output .recovered { background: #fbd9d3; }
.output .bonus { background: #d6e4fb; }
.output .forced { background: #e8dcf7; }
details { border-top: 1px solid #dde1e7; padding: .4rem 0; } summary { cursor: pointer; }
.times { color: #5d6878; } .scroll { overflow-x: auto; }
svg text { font: 12px ui-monospace, monospace; fill: #1d2430; } svg .small { font-size: 10px; fill: #5d6878; }
svg .accepted { fill: #cdeed6; stroke: #2c8a4b; } svg .rejected { fill: #fbd9d3; stroke: #b8402a; }
svg .unverified { fill: #f0f1f4; stroke: #9aa3b0; stroke-dasharray: 3 2; } svg .root { fill: #fff; stroke: #5d6878; }
svg line { stroke: #9aa3b0; }
"""
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 150, 40, 30, 10
"""Pixels of a node's box, and between boxes."""
_MOST_CHARS = 16
"""Characters of a token's text in its box."""


def page_of(explained: Explained, *, title: str, facts: Mapping[str, str]) -> str:
    """The page; `facts` are names and values above the steps."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><table>{rows}</table>",
        "<h2>Output</h2>",
        f'<div class="output">{_output(explained.steps)}</div>',
        '<p class="times">Green: an accepted draft token. Red: the target\'s token in place of a rejected one. Blue: '
        "the target's token after accepted ones. Purple: the only token that a constraint allowed.</p>",
        "<h2>Steps</h2>",
        *(_step(step) for step in explained.steps),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _output(steps: Sequence[ExplainedStep]) -> str:
    tokens = (token for step in steps for token in step.tokens)
    return "".join(
        f'<span class="{escape(token.origin)}" title="{escape(_origin(token.origin, token.drafter))}">'
        f"{escape(token.text)}</span>"
        for token in tokens
    )


def _origin(origin: str, drafter: str) -> str:
    return f"{origin} ({drafter})" if drafter else origin


def _step(step: ExplainedStep) -> str:
    times = step.times
    spent = [f"at {times.at_ms:.1f} ms", f"step {times.step_ms:.1f} ms"]
    spent += [f"waited for a draft {times.hold_off_ms:.1f} ms"] if times.hold_off_ms else []
    spent += [f"elsewhere {times.elsewhere_ms:.1f} ms"]
    spent += [f"drafting {times.draft_ms:.1f} ms"] if times.draft_ms else []
    spent += ["speculation suspended after it"] if step.is_suspended else []
    head = f'{step.number}. {escape(step.summary)} <span class="times">· {escape(" · ".join(spent))}</span>'
    text = escape("".join(token.text for token in step.tokens))
    body = f'<div class="output">{text}</div>'
    if step.nodes:
        body += f'<div class="scroll">{tree_picture(step.nodes)}</div>{_reasons(step.nodes)}'
    is_open = " open" if any(node.state is State.REJECTED for node in step.nodes) else ""
    return f"<details{is_open}><summary>{head}</summary>{body}</details>"


def _reasons(nodes: Sequence[ExplainedNode]) -> str:
    rows = "".join(
        f"<tr><td>{escape(node.text)}</td><td>{escape(node.drafter or '-')}</td>"
        f'<td class="number">{node.rank}</td><td class="number">{node.score:.2f}</td>'
        f'<td class="number">{_prob(node.target_prob)}</td><td>{node.state}</td><td>{escape(node.why)}</td></tr>'
        for node in nodes
    )
    return (
        "<table><tr><th>token</th><th>drafter</th><th>rank</th><th>score</th><th>target's p</th><th></th>"
        f"<th>why</th></tr>{rows}</table>"
    )


def tree_picture(nodes: Sequence[ExplainedNode]) -> str:
    """A step's nodes as SVG: left to right, likeliest on top, coloured by their state."""
    places: dict[int, tuple[int, float]] = {}
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    num_leaves = 0

    order, stack = [], [ROOT]
    while stack:
        node_index = stack.pop()
        order.append(node_index)
        below = sorted(children.get(node_index, []), key=lambda child: (nodes[child].rank, child))
        stack += reversed(below)
    for node_index in order:  # leaves from top to bottom
        if node_index not in children:
            places[node_index] = (0 if node_index == ROOT else nodes[node_index].depth, float(num_leaves))
            num_leaves += 1
    for node_index in reversed(order):  # others between their children
        if node_index in children:
            rows = [places[child][1] for child in children[node_index]]
            depth = 0 if node_index == ROOT else nodes[node_index].depth
            places[node_index] = (depth, (min(rows) + max(rows)) / 2)
    width = (1 + max(node.depth for node in nodes)) * (_WIDTH + _GAP_X)
    height = num_leaves * (_HEIGHT + _GAP_Y)
    lines = [_line(places[node.parent], places[index]) for index, node in enumerate(nodes)]
    boxes = [_box(places[ROOT], "root", "last committed", "")]
    for index, node in enumerate(nodes):
        small = f"{node.score:.2f}" + ("" if node.target_prob is None else f"  target {node.target_prob:.2f}")
        boxes.append(_box(places[index], node.state, _shown(node.text), small, node.why))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" '
        f'aria-label="tree of {len(nodes)} proposed tokens">{"".join(lines)}{"".join(boxes)}</svg>'
    )


def _line(above: tuple[int, float], below: tuple[int, float]) -> str:
    (x1, y1), (x2, y2) = _corner(above), _corner(below)
    return f'<line x1="{x1 + _WIDTH}" y1="{y1 + _HEIGHT / 2:.0f}" x2="{x2}" y2="{y2 + _HEIGHT / 2:.0f}"/>'


def _box(place: tuple[int, float], kind: str, text: str, small: str, title: str = "") -> str:
    x, y = _corner(place)
    hint = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<g>{hint}<rect class="{kind}" x="{x}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{x + 8}" y="{y + 17:.0f}">{escape(text)}</text>'
        f'<text class="small" x="{x + 8}" y="{y + 32:.0f}">{escape(small)}</text></g>'
    )


def _corner(place: tuple[int, float]) -> tuple[int, float]:
    return place[0] * (_WIDTH + _GAP_X), place[1] * (_HEIGHT + _GAP_Y) + _GAP_Y / 2


def _shown(text: str) -> str:
    quoted = repr(text)[1:-1]
    return f"«{quoted if len(quoted) <= _MOST_CHARS else quoted[: _MOST_CHARS - 1] + '…'}»"


def _prob(prob: float | None) -> str:
    return "-" if prob is None else f"{prob:.3f}"
