"""Runs a draft replica: `python -m specdec.draft_service --model ...`."""

import sys
from collections.abc import Sequence

from specdec.config import DraftSettings, settings_or_exit
from specdec.replica.bridge.replica_service import ReplicaRole, run_replica
from specdec.v1 import draft_pb2

ROLE = ReplicaRole(
    name="draft",
    grpc_name=draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    stream_method="Draft",
    engine_entry="specdec.draft_service.worker:run_engine",
    serves_tokenizer=False,
)


def main(argv: Sequence[str] | None = None, prog: str = "python -m specdec.draft_service") -> int:
    """Runs until a signal ends it; returns the exit code: 0 drained and stopped, 1 failed, 2 bad settings."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = settings_or_exit(DraftSettings, arguments, env_prefix=DraftSettings.env_prefix, prog=prog)
    return run_replica(ROLE, settings)


if __name__ == "__main__":
    sys.exit(main())
