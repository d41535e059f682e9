"""The terminal output of `specdec debug`: a tree for each step, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from specdec.commands.debug.steps import ROOT, Explained, ExplainedNode, ExplainedStep, State
from specdec.commands.views.tables import harmless, make_table

_STYLES = {State.ACCEPTED: "green", State.REJECTED: "red", State.UNVERIFIED: "dim"}
_MARKS = {State.ACCEPTED: "✓", State.REJECTED: "✗", State.UNVERIFIED: "·"}
_ORIGIN_STYLES = {"draft": "green", "recovered": "red", "bonus": "cyan", "forced": "blue", "prefill": "magenta"}


def steps_view(explained: Explained, most: int | None = None) -> list[RenderableType]:
    """The first `most` steps (None: all), one below the other."""
    shown: list[RenderableType] = [_step(step) for step in explained.steps[:most]]
    if len(explained.steps) > len(shown):
        shown.append(Text(f"... and {len(explained.steps) - len(shown)} more steps (--steps)", style="dim"))
    return shown


def legend() -> Text:
    """Meaning of the marks."""
    text = Text("✓ accepted", style="green")
    text.append("   ✗ rejected", style="red")
    text.append("   · not verified", style="dim")
    return text.append("   score: the drafter's estimate   p: the target's probability", style="dim")


def losses_table(explained: Explained) -> Table:
    """Table of the times after the first step."""
    table = make_table("Where the time went, after the first step", "", "ms", "share")
    lost = explained.lost
    total = sum(lost.values())
    for name, ms in lost.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / total:.0%}" if total else "-")
    later = explained.steps[1:]
    rows = sum(step.num_verified for step in later)
    vain = rows - sum(step.num_accepted for step in later)
    table.caption = f"verified draft tokens: {rows} in {len(later)} steps, {vain} of them rejected"
    table.caption_justify = "left"
    return table


def drafters_table(explained: Explained, costs_ms: Mapping[str, float]) -> Table:
    """Table of each drafter's tokens and cost. A token that several proposed counts for the first.

    `costs_ms`: the target's measurement for its own drafters, by name; a draft service's cost is unknown.
    """
    table = make_table("By drafter", "", "proposed", "verified", "accepted", "ms", "accepted per ms")
    for name, own in sorted(explained.by_drafter.items()):
        cost_ms = costs_ms.get(name)
        cost = ("-", "-") if not cost_ms else (f"{cost_ms:.1f}", f"{own['accepted'] / cost_ms:.2f}")
        table.add_row(harmless(name) or "unknown", *(str(number) for number in own.values()), *cost)
    return table


def _step(step: ExplainedStep) -> RenderableType:
    times = step.times
    head = Text(f"step {step.number}", style="bold")
    head.append(f"  at {times.at_ms:.1f} ms  {step.summary}", style="default not bold")
    spent = f"  step {times.step_ms:.1f}"
    spent += f", waited for a draft {times.hold_off_ms:.1f}" if times.hold_off_ms else ""
    spent += f", elsewhere {times.elsewhere_ms:.1f}"
    spent += f"; drafting {times.draft_ms:.1f}" if times.draft_ms else ""
    head.append(f"{spent} ms", style="dim not bold")
    if step.is_suspended:
        head.append("  speculation suspended: plain decoding is faster", style="yellow not bold")
    text = Text("  ")
    for token in step.tokens:
        text.append(_quoted(token.text), style=_ORIGIN_STYLES.get(token.origin, ""))
    if not step.nodes:
        return Group(head, text)
    tree = Tree(text, guide_style="dim", hide_root=False)
    branches: dict[int, Tree] = {ROOT: tree}
    for index, node in enumerate(step.nodes):
        branches[index] = branches[node.parent].add(_node(node))
    return Group(head, tree)


def _node(node: ExplainedNode) -> Text:
    style = _STYLES[node.state]
    line = Text(f"{_MARKS[node.state]} {_quoted(node.text)}", style=style)
    details = f"  score {node.score:.2f}"
    details += "" if node.target_prob is None else f"  p {node.target_prob:.3f}"
    details += f"  {node.drafter}" if node.drafter else ""
    line.append(harmless(details), style="dim")
    if node.state is State.REJECTED:
        line.append(f"  {harmless(node.why)}", style="default")
    return line


def _quoted(text: str) -> str:
    return f"‹{harmless(text.replace(chr(10), '⏎'))}›"
