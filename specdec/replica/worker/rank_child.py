"""The first code of a following rank: `python -m specdec.replica.worker.rank_child`, started by `ranks.py`.

It reads its instructions from standard input, joins the other ranks, loads its shard, and runs rank 0's steps.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
from pathlib import Path
from typing import TypedDict

import structlog

from specdec.service.process import die_with_parent, leave_signals_to_parent
from specdec.telemetry import setup_logging
from specdec.telemetry.logs.writer import flush_logs

EXIT_REFUSED = 3
"""Exit code if the model was refused: rank 0, which runs the same checks, reports why."""


class RankInstructions(TypedDict):
    """The leading rank's instructions."""

    rank: int
    settings: str
    """EngineSettings as JSON."""
    first_device: str
    """Rank 0's device: cpu, cuda:0, ..."""
    store_fd: int
    """Open file for the ranks' rendezvous."""
    socket_fd: int
    parent_pid: int
    cores: list[int] | None
    service: str
    log_level: str
    log_format: str


def store_path(store_fd: int) -> Path:
    """Path by which a process with this descriptor can open the file again."""
    return Path(f"/proc/self/fd/{store_fd}")


def main() -> int:
    """Follow rank 0; returns 0 when it stops or is gone, 1 after a failure, EXIT_REFUSED if the model is refused."""
    instructions: RankInstructions = json.load(sys.stdin)
    die_with_parent(instructions["parent_pid"])
    leave_signals_to_parent()
    faulthandler.enable()
    setup_logging(instructions["service"], instructions["log_level"], instructions["log_format"])
    if instructions["cores"]:
        os.sched_setaffinity(0, instructions["cores"])
    for descriptor in (instructions["socket_fd"], instructions["store_fd"]):
        os.set_inheritable(descriptor, False)
    log = structlog.get_logger("specdec.replica.worker.rank_child")

    # Imported late: these imports take seconds, in which the parent may die.
    from specdec.engine.errors import EngineError
    from specdec.engine.leading_runner import follow
    from specdec.engine.model.runner import ModelRunner
    from specdec.engine.parallel.rank_group import RankGroup
    from specdec.engine.parallel.step_frames import LeaderGone
    from specdec.engine.settings import EngineSettings

    settings = EngineSettings.model_validate_json(instructions["settings"])
    try:
        with socket.socket(fileno=instructions["socket_fd"]) as connection:
            group = RankGroup.join(
                instructions["rank"],
                settings.tensor_parallel_size,
                instructions["first_device"],
                store_path(instructions["store_fd"]),
                settings.collective_timeout_s,
            )
            runner = ModelRunner.load(settings, group)
            runner.warmup()
            log.info("rank_ready", rank=group.rank, device=str(group.device), kv_blocks=runner.num_blocks)
            follow(runner, connection)
    except LeaderGone:
        return 0
    except EngineError as error:
        log.error("rank_refused", rank=instructions["rank"], reason=str(error))
        return EXIT_REFUSED
    except Exception:
        log.exception("rank_failed", rank=instructions["rank"])
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing torch down takes seconds, and would wait for lost ranks.
    flush_logs()
    os._exit(exit_code)
