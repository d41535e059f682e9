"""A direct link at random: it dies, lies, lags, repeats, reorders and loses, while a session decodes over it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

from specdec.v1 import common_pb2 as pb
from tests.protocol.linked_pair import EPOCH, LinkedPair, linked_pair
from tests.protocol.simulation.link_safety import LinkSafety
from tests.protocol.simulation.safety import Violations

_MOST_TURNS = 400
_FAULT_SHARE = 0.5
"""Share of turns that begin with a fault."""
_SKIPS_S = (0.0, 0.0, 0.02, 0.3, 6.0)
"""Seconds between two turns: joins are tried again after up to 5 s."""
LINK_FAULTS = (
    "lag", "lose", "repeat", "reorder", "die", "deliver", "again", "both", "grant", "old-epoch", "lie", "stranger",
    "garbage",
)  # fmt: skip
_EXTREMES = (0, 1, 2**31, 2**32 - 1)
_MOST_EPOCH = 2**64 - 1


@dataclass(frozen=True, slots=True)
class LinkOutcome:
    """What a run came to."""

    violations: tuple[str, ...]
    faults: Counter[str]
    num_linked: int
    """Verdicts whose tokens went to the draft on the link."""
    num_relayed: int
    """Proposals that came by way of the coordinator."""
    num_accepted: int


def run_link(seed: int) -> LinkOutcome:
    """Decode one session to its end."""
    rng = random.Random(f"link {seed}")
    violations = Violations()
    with linked_pair() as pair:
        LinkSafety("target", pair.target.worker.links, violations)
        LinkSafety("draft", pair.draft.worker.links, violations)
        temperature = rng.choice((0.0, 1.0))
        whole = _undisturbed(temperature)
        pair.open(temperature=temperature)
        pair.grant()
        faults = _LinkFaults(pair, rng)
        for _ in range(_MOST_TURNS):
            if pair.is_over:
                break
            if rng.random() < _FAULT_SHARE:
                faults.happen()
            pair.loop.skip(rng.choice(_SKIPS_S))
            pair.turn()
            if pair.aborts:  # the servicers end the stream
                pair.aborts.clear()
                pair.cut()
        violations.check(tuple(pair.output) == whole, "ended with", pair.output, "not", whole)
        return LinkOutcome(
            violations=tuple(dict.fromkeys(violations)),
            faults=faults.count,
            num_linked=sum(verdict.HasField("linked") for verdict in pair.verdicts),
            num_relayed=len(pair.relayed),
            num_accepted=sum(verdict.num_accepted for verdict in pair.verdicts),
        )


@cache
def _undisturbed(temperature: float) -> tuple[int, ...]:
    with linked_pair() as pair:
        pair.relays = False
        pair.open(temperature=temperature)
        return tuple(pair.run())


class _LinkFaults:
    """Draws faults; each can happen at any time."""

    def __init__(self, pair: LinkedPair, rng: random.Random) -> None:
        self.count: Counter[str] = Counter()
        self._pair = pair
        self._rng = rng
        self._seen: list[pb.LinkEntry] = []
        """Entries of both directions that were on the link, to be sent again."""
        self._late: list[tuple[bool, pb.LinkEntry]] = []
        """Entries that the link keeps back, with whether the target gets them."""
        self._next_way: dict[bool, str] = {}
        pair.to_draft = lambda frame: self._carry(frame, is_to_target=False)
        pair.to_target = lambda frame: self._carry(frame, is_to_target=True)

    def happen(self) -> None:
        """One of `LINK_FAULTS`."""
        pair, rng = self._pair, self._rng
        kind = rng.choice(LINK_FAULTS)
        self.count[kind] += 1
        match kind:
            case "lag" | "lose" | "repeat" | "reorder":
                self._next_way[rng.random() < 0.5] = kind  # for the next frame in this direction
            case "die":
                pair.cut()
            case "deliver":
                self._deliver()
            case "again":
                self._send_again()
            case "both":
                self._relay_too()
            case "grant":
                key = rng.randbytes(16)
                pair.grant(key, key)
            case "old-epoch":
                self._lie(rng.choice((0, EPOCH - 1, EPOCH + 1, _MOST_EPOCH)))
            case "lie":
                self._lie(EPOCH)
            case "stranger":
                self._send_as_stranger()
            case "garbage":
                self._send_garbage()

    def _carry(self, frame: pb.LinkFrame, *, is_to_target: bool) -> pb.LinkFrame | None:
        entries = list(frame.entries)
        self._seen = [*self._seen, *entries][-20:]
        match self._next_way.pop(is_to_target, ""):
            case "lag":
                self._late += [(is_to_target, entry) for entry in entries]
                return None
            case "lose":
                return None
            case "repeat":
                entries += entries
            case "reorder":
                held = [entry for to_target, entry in self._late if to_target == is_to_target]
                self._late = [each for each in self._late if each[0] != is_to_target]
                entries = [*entries[::-1], *held]
        return pb.LinkFrame(hello=frame.hello if frame.HasField("hello") else None, entries=entries)

    def _deliver(self) -> None:
        late, self._late = self._late, []
        for is_to_target, entry in late:
            self._send(entry, is_to_target=is_to_target)

    def _send_again(self) -> None:
        if self._seen:
            entry = self._rng.choice(self._seen)
            self._send(entry, is_to_target=entry.WhichOneof("entry") in ("join", "proposal"))

    def _send(self, entry: pb.LinkEntry, *, is_to_target: bool) -> None:
        if self._pair.dialled:
            self._pair.send(self._pair.target if is_to_target else self._pair.draft, entry)

    def _send_garbage(self) -> None:
        if self._pair.dialled:
            self._pair.send_bytes(self._rng.choice((self._pair.target, self._pair.draft)), self._rng.randbytes(9))

    def _relay_too(self) -> None:
        start = self._rng.randrange(len(self._pair.tokens))
        if not self._pair.errors:
            self._pair.tell_draft(commit=pb.Commit(start_position=start, token_ids=self._pair.tokens[start:]))

    def _lie(self, epoch: int) -> None:
        """A proposal that is made up, or a commit that contradicts what the draft has."""
        entry = self._made_up(epoch)
        self._send(entry, is_to_target=entry.WhichOneof("entry") == "proposal")

    def _send_as_stranger(self) -> None:
        join = pb.LinkEntry(session_id="s", epoch=EPOCH, join=pb.LinkJoin(key=self._rng.randbytes(16)))
        self._pair.send_as_stranger(join, self._made_up(EPOCH), self._made_up(self._rng.choice((0, EPOCH + 1))))

    def _made_up(self, epoch: int) -> pb.LinkEntry:
        rng, position = self._rng, len(self._pair.tokens)
        if rng.random() < 0.3:
            position = rng.choice(_EXTREMES)
        token_ids = [rng.choice((rng.randrange(5, 25), *_EXTREMES)) for _ in range(rng.randrange(4))]
        if rng.random() < 0.5:
            proposal = pb.Proposal(start_position=position, token_ids=token_ids, draft_us=rng.choice(_EXTREMES))
            return pb.LinkEntry(session_id="s", epoch=epoch, proposal=proposal.SerializeToString())
        commit = pb.Commit(start_position=max(0, position - rng.randrange(3)), token_ids=token_ids)
        return pb.LinkEntry(session_id="s", epoch=epoch, commit=commit)
