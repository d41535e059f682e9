"""What `specdec debug` shows in the terminal: a tree for each step, and where the time went."""

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
    """The steps one below the other, at most so many from the first one on."""
    shown: list[RenderableType] = [_step(step) for step in explained.steps[:most]]
    if len(explained.steps) > len(shown):
        shown.append(Text(f"... and {len(explained.steps) - len(shown)} more steps (--steps)", style="dim"))
    return shown


def legend() -> Text:
    """What the marks mean."""
    text = Text("✓ accepted", style="green")
    text.append("   ✗ verified in vain", style="red")
    text.append("   · not verified", style="dim")
    return text.append("   score: what its drafter gave it   p: the target's probability of it", style="dim")


def losses_table(explained: Explained) -> Table:
    """Where the time after the first token went."""
    table = make_table("Where the time went, after the first step", "", "ms", "share")
    lost = explained.lost
    total = sum(lost.values())
    for name, ms in lost.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / total:.0%}" if total else "-")
    later = explained.steps[1:]
    rows = sum(step.num_verified for step in later)
    vain = rows - sum(step.num_accepted for step in later)
    table.caption = f"draft tokens that cost a row: {rows} in {len(later)} steps, {vain} of them in vain"
    table.caption_justify = "left"
    return table


def drafters_table(explained: Explained, costs_ms: Mapping[str, float]) -> Table:
    """Who proposed what, what became of it, and what it cost. A token that several proposed counts for the first.

    `costs_ms`: of the target's own drafters by name, as the target measured it. A draft service's is not known.
    """
    table = make_table("By drafter", "", "proposed", "verified", "accepted", "ms", "accepted per ms")
    for name, own in sorted(explained.by_drafter.items()):
        cost_ms = costs_ms.get(name)
        told = ("-", "-") if not cost_ms else (f"{cost_ms:.1f}", f"{own['accepted'] / cost_ms:.2f}")
        table.add_row(harmless(name) or "not told", *(str(number) for number in own.values()), *told)
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
    told = f"  score {node.score:.2f}"
    told += "" if node.target_prob is None else f"  p {node.target_prob:.3f}"
    told += f"  {node.drafter}" if node.drafter else ""
    line.append(harmless(told), style="dim")
    if node.state is State.REJECTED:
        line.append(f"  {harmless(node.why)}", style="default")
    return line


def _quoted(text: str) -> str:
    return f"‹{harmless(text.replace(chr(10), '⏎'))}›"
