"""Results of a session, as its coordinator sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.v1 import common_pb2 as pb


@dataclass
class Outcome:
    """Results of a session."""

    token_ids: list[int] = field(default_factory=list)
    verdicts: list[pb.Verdict] = field(default_factory=list)
    rejected: list[pb.ProposalRejected] = field(default_factory=list)
    error: pb.SessionError | None = None
    draft_errors: list[pb.SessionError] = field(default_factory=list)

    @property
    def finish_reason(self) -> int:
        return self.verdicts[-1].finish_reason if self.verdicts else 0

    @property
    def stop_token_id(self) -> int | None:
        last = self.verdicts[-1]
        return last.stop_token_id if last.HasField("stop_token_id") else None

    @property
    def logprobs(self) -> list[bytes]:
        return [entry.SerializeToString() for verdict in self.verdicts for entry in verdict.logprobs]

    @property
    def origins(self) -> list[int]:
        return [origin for verdict in self.verdicts for origin in verdict.origins]

    @property
    def num_accepted(self) -> int:
        return sum(verdict.num_accepted for verdict in self.verdicts)

    @property
    def accepted_by(self) -> list[str]:
        """Drafter of each accepted token, of the steps that name it."""
        return [name for verdict in self.verdicts for name in verdict.accepted_by]

    def num_of(self, drafter: str, what: str) -> int:
        """Sum over steps of a field of one drafter's records."""
        records = (record for verdict in self.verdicts for record in verdict.drafters)
        return sum(getattr(record, what) for record in records if record.name == drafter)

    @property
    def num_verified(self) -> int:
        return sum(sum(verdict.verified_by_depth) for verdict in self.verdicts)
