"""Acceptance by kind of prompt, by position in the output, and by drafter.

Acceptance by kind comes from the statistics of all runs; the rest from untimed runs that ask for their steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.commands.measuring.served import Load, LoadRun
from specdec.commands.measuring.streams import Stream
from specdec.commands.measuring.summary import acceptance, percent
from specdec.commands.measuring.svg import PlotPoint, lines
from specdec.commands.measuring.tables import Table
from specdec.v1 import common_pb2 as pb

_FIRST_POSITIONS = 16
"""Positions of the first bucket; each further bucket ends at twice as many."""
_NOT_KNOWN = "unknown"
"""Drafter of tokens whose server does not report it."""


@dataclass(slots=True)
class _Nodes:
    """Counts of proposed, verified and accepted tokens."""

    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    verified_at: Counter[int] = field(default_factory=Counter)
    """Steps by depth at which they verified a token."""
    accepted_at: Counter[int] = field(default_factory=Counter)

    @property
    def accepted_share(self) -> float | None:
        """Accepted share of the verified tokens."""
        return self.num_accepted / self.num_verified if self.num_verified else None

    @property
    def by_depth(self) -> list[float | None]:
        """Acceptance by depth, from 1; None: no token was verified there."""
        deepest = max(self.verified_at, default=0)
        return [
            self.accepted_at[depth] / self.verified_at[depth] if self.verified_at[depth] else None
            for depth in range(1, deepest + 1)
        ]


def breakdown_of(passes: Sequence[LoadRun], kinds: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
    """Rows `by_kind`, `by_position` and `by_drafter`, each of one load with speculation.

    Args:
        passes: from `served.measure`; of an interrupted one, requests that ended count.
        kinds: one for each prompt, in order; empty for a prompt without one. Without kinds there are no rows by kind.
    """
    loads = list(dict.fromkeys(one.load for one in passes if one.speculate))
    names = [kind for kind in dict.fromkeys(kinds) if kind] + ([""] if "" in kinds else [])
    by_kind = [_kind_row(load, name, passes, kinds) for load in loads for name in names] if any(kinds) else []
    return {
        "by_kind": [row for row in by_kind if row["num_requests"]],
        "by_position": [row for load in loads for row in _position_rows(load, _told(passes, load))],
        "by_drafter": [row for load in loads for row in _drafter_rows(load, _told(passes, load))],
    }


def _told(passes: Sequence[LoadRun], load: Load) -> list[Stream]:
    """Ended requests of runs that asked for steps."""
    own = (one for one in passes if one.load == load and one.tells_steps)
    return [stream for one in own for stream in one.streams if stream.ended_s is not None]


def _kind_row(load: Load, kind: str, passes: Sequence[LoadRun], kinds: Sequence[str]) -> dict[str, Any]:
    def of_kind(one: LoadRun) -> list[Stream]:
        # Streams are in the order of requests, which take the prompts in turns.
        return [stream for number, stream in enumerate(one.streams) if kinds[number % len(kinds)] == kind]

    timed = [one for one in passes if one.load == load and not one.tells_steps]
    plain = {one.repeat: of_kind(one) for one in timed if not one.speculate}
    own = {one.repeat: of_kind(one) for one in timed if one.speculate}
    ended = [stream for streams in own.values() for stream in streams if stream.ended_s is not None]
    pairs = [pair for repeat, streams in own.items() for pair in zip(streams, plain.get(repeat, ()), strict=False)]
    spent_s = [
        (sum(fast.gaps_s), sum(slow.gaps_s))
        for fast, slow in pairs
        if fast.ended_s is not None and slow.ended_s is not None and len(fast.gaps_s) == len(slow.gaps_s)
    ]
    fast_s, slow_s = sum(fast for fast, _ in spent_s), sum(slow for _, slow in spent_s)
    told = [s for one in passes if one.load == load and one.tells_steps for s in of_kind(one) if s.ended_s is not None]
    num_tokens = sum(stream.num_tokens for stream in told)
    return {
        "load": str(load),
        "kind": kind or None,
        "num_requests": len(ended),
        **acceptance([stream.finished.stats for stream in ended if stream.finished]),
        "decoding_speedup": slow_s / fast_s if fast_s else None,
        "output_shares": {name: nodes.num_accepted / num_tokens for name, nodes in _by_drafter(told).items()}
        if num_tokens
        else {},
    }


def _position_rows(load: Load, told: Sequence[Stream]) -> Iterator[dict[str, Any]]:
    steps = [(bucket_of(step.start), step) for stream in told for step in stream.steps if step.tree.verified]
    for bucket in sorted({bucket for bucket, _ in steps}):
        own = [step for other, step in steps if other == bucket]
        verified, accepted = sum(len(s.tree.verified) for s in own), sum(len(s.tree.accepted) for s in own)
        yield {
            "load": str(load),
            "first_position": bucket[0],
            "last_position": bucket[1],
            "num_verify_steps": len(own),
            "mean_acceptance_length": sum(step.num_tokens for step in own) / len(own),
            "accepted_share": accepted / verified,
        }


def bucket_of(start: int) -> tuple[int, int]:
    """First and last position, from 1, of the bucket that holds the output token of this index."""
    first, last = 1, _FIRST_POSITIONS
    while start >= last:
        first, last = last + 1, 2 * last
    return first, last


def _drafter_rows(load: Load, told: Sequence[Stream]) -> Iterator[dict[str, Any]]:
    num_tokens = sum(stream.num_tokens for stream in told)
    costs_ms: dict[str, float] = {}
    for stream in told:
        if stream.finished:
            for record in stream.finished.stats.drafters:
                costs_ms[record.name] = costs_ms.get(record.name, 0.0) + record.cost_ms
    for name, nodes in sorted(_by_drafter(told).items()):
        yield {
            "load": str(load),
            "drafter": name,
            "num_proposed": nodes.num_proposed,
            "num_verified": nodes.num_verified,
            "num_accepted": nodes.num_accepted,
            "accepted_share": nodes.accepted_share,
            "output_share": nodes.num_accepted / num_tokens if num_tokens else None,
            "acceptance_by_depth": nodes.by_depth,
            "cost_ms": costs_ms.get(name),
        }


def _by_drafter(told: Sequence[Stream]) -> dict[str, _Nodes]:
    """Counts by drafter of the tokens that it proposed first."""
    found: dict[str, _Nodes] = {}
    for tree in (step.tree for stream in told for step in stream.steps):
        names, depths = _proposers(tree), _depths(tree)
        for name in names:
            found.setdefault(name, _Nodes()).num_proposed += 1
        for node in tree.verified:
            found[names[node]].num_verified += 1
        for node in tree.accepted:
            found[names[node]].num_accepted += 1
        for name, depth in {(names[node], depths[node]) for node in tree.verified}:
            found[name].verified_at[depth] += 1
        for name, depth in {(names[node], depths[node]) for node in tree.accepted}:
            found[name].accepted_at[depth] += 1
    return found


def _proposers(tree: pb.StepTree) -> list[str]:
    if len(tree.proposed_by) != len(tree.token_ids):
        return [_NOT_KNOWN] * len(tree.token_ids)
    return [tree.drafters[place] for place in tree.proposed_by]


def _depths(tree: pb.StepTree) -> list[int]:
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def breakdown_tables(found: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> list[Table]:
    """One table for each part that has rows."""
    kind = Table(
        f"Acceptance by kind of prompt, {title}",
        ("load", "kind", "requests", "tokens per verifying step", "of verified", "by depth 1, 2, ...",
         "decoding speed-up", "output tokens of"),
    )  # fmt: skip
    for row in found["by_kind"]:
        shares = " ".join(f"{name} {percent(share)}" for name, share in sorted(row["output_shares"].items()))
        kind.add(row["load"], row["kind"], row["num_requests"], row["mean_acceptance_length"],
                 percent(row["accepted_share"]), _in_order(row["acceptance_by_depth"]), row["decoding_speedup"],
                 shares)  # fmt: skip
    kind.notes.append("Decoding speed-up: time from first to last token without speculation over the time with it.")
    position = Table(
        f"Acceptance by position, {title}",
        ("load", "output tokens", "verifying steps", "tokens per verifying step", "of verified"),
    )
    for row in found["by_position"]:
        position.add(row["load"], f"{row['first_position']} to {row['last_position']}", row["num_verify_steps"],
                     row["mean_acceptance_length"], percent(row["accepted_share"]))  # fmt: skip
    position.notes.append("A step counts at the position of its first token.")
    drafter = Table(
        f"Acceptance by drafter, {title}",
        ("load", "drafter", "proposed", "verified", "accepted", "of verified", "of output", "by depth 1, 2, ...",
         "cost in ms", "ms per accepted"),
    )  # fmt: skip
    for row in found["by_drafter"]:
        cost_ms, accepted = row["cost_ms"], row["num_accepted"]
        drafter.add(row["load"], row["drafter"], row["num_proposed"], row["num_verified"], accepted,
                    percent(row["accepted_share"]), percent(row["output_share"]),
                    _in_order(row["acceptance_by_depth"]), cost_ms,
                    cost_ms / accepted if cost_ms is not None and accepted else None)  # fmt: skip
    drafter.notes.append(
        "A token that several proposed counts for the first. Cost: calls of the target's own drafters, without their "
        "rows in its steps."
    )
    return [table for table in (kind, position, drafter) if table.rows]


def _in_order(shares: Sequence[float | None]) -> str:
    return " ".join("-" if share is None else f"{share:.2f}" for share in shares)


def breakdown_plots(found: Mapping[str, Sequence[Mapping[str, Any]]], note: str) -> dict[str, str]:
    """SVG plots by name: acceptance by depth for each kind or drafter, and by position for each load."""
    plots: dict[str, str] = {}
    for part, key, words in (("by_kind", "kind", "kind of prompt"), ("by_drafter", "drafter", "drafter")):
        series = {
            f"{row[key] or 'no kind'}, {row['load']}": _points(row["acceptance_by_depth"])
            for row in found[part]
            if any(row["acceptance_by_depth"])
        }
        if series:
            title = f"Acceptance by depth and {words}"
            plots[f"acceptance-{key}"] = lines(title, note, "depth of the draft token", "accepted share", series)
    positions: dict[str, list[PlotPoint]] = {}
    for row in found["by_position"]:
        share = row["accepted_share"]
        positions.setdefault(row["load"], []).append(PlotPoint(row["first_position"], share, share, share))
    if positions:
        title, x_name = "Acceptance by position", "output token, first of each part"
        plots["acceptance-position"] = lines(title, note, x_name, "accepted share", positions, log_x=True)
    return plots


def _points(shares: Sequence[float | None]) -> list[PlotPoint]:
    return [PlotPoint(depth, share, share, share) for depth, share in enumerate(shares, 1) if share is not None]
