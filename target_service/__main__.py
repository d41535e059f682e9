"""Runs a target replica: `python -m specdec.target_service --model ...`."""

import sys
from collections.abc import Sequence

from specdec.config import TargetSettings, settings_or_exit
from specdec.replica.bridge.replica_service import ReplicaRole, run_replica
from specdec.v1 import target_pb2

ROLE = ReplicaRole(
    name="target",
    grpc_name=target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    stream_method="Verify",
    engine_entry="specdec.target_service.worker:run_engine",
    serves_tokenizer=True,
    link_method="Link",
    engine_method="SetDrafters",
)


def main(argv: Sequence[str] | None = None, prog: str = "python -m specdec.target_service") -> int:
    """Run until a signal ends the process; returns the exit code: 0 drained and stopped, 1 failed, 2 bad settings."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = settings_or_exit(TargetSettings, arguments, env_prefix=TargetSettings.env_prefix, prog=prog)
    if settings.node_rank:
        from specdec.replica.ranks.node_service import run_node  # takes a second

        return run_node(ROLE.name, ROLE.grpc_name, settings)
    return run_replica(ROLE, settings)


if __name__ == "__main__":
    sys.exit(main())
