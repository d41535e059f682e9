"""The first code of a rank that does not lead: `python -m specdec.replica.ranks.rank_child`, started by `processes.py`.

It reads its instructions from standard input, joins the other ranks, loads its shard, and runs rank 0's steps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import structlog

from specdec.replica.bridge.pulse import Pulse
from specdec.service.process import die_with_parent, leave_signals_to_parent
from specdec.telemetry import setup_logging
from specdec.telemetry.logs.writer import flush_logs

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from specdec.engine.settings import EngineSettings

EXIT_REFUSED = 3
"""Exit code if the model or the rank was refused: rank 0, which runs the same checks, reports why."""


class LeaderPlace(TypedDict):
    """The leader of a rank on another node."""

    nodes: str
    """NodeSettings as JSON."""
    hello: str
    """The rank's Hello as JSON."""
    host: str


class RankInstructions(TypedDict):
    """What a rank is told by the process that starts it."""

    rank: int
    local_rank: int
    """Its number on its machine."""
    settings: str
    """EngineSettings as JSON."""
    first_device: str
    """Device of the machine's first rank: cpu, cuda:0, ...; empty: this process finds it."""
    store_fd: int | None
    """Open file in which ranks of one machine meet; None: they meet at `store`."""
    store: tuple[str, int]
    """Host and port of the leader's store."""
    socket_fd: int | None
    """Socket for steps; None: it calls `leader`."""
    pulse_fd: int | None
    """Memory of a pulse for the rank's marks; None: nobody reads them."""
    leader: LeaderPlace | None
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
    for descriptor in (instructions["socket_fd"], instructions["store_fd"], instructions["pulse_fd"]):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    log = structlog.get_logger("specdec.replica.ranks.rank_child")
    rank, pulse = instructions["rank"], Pulse(instructions["pulse_fd"])

    # Imported late: these imports take seconds, in which the parent may die.
    from specdec.engine.errors import EngineError
    from specdec.engine.leading_runner import follow
    from specdec.engine.model.runner import ModelRunner
    from specdec.engine.parallel.frames import LeaderGone, StepKind
    from specdec.engine.parallel.rank_group import RankGroup, device_of_rank
    from specdec.engine.settings import EngineSettings
    from specdec.replica.ranks.messages import Loaded, Refused, send

    settings = EngineSettings.model_validate_json(instructions["settings"])
    try:
        first_device = instructions["first_device"] or _first_device(settings, instructions["leader"])
        device = device_of_rank(first_device, instructions["local_rank"])
        with _connected(instructions) as connection:
            store = _store(instructions, settings.tensor_parallel_size)
            group = RankGroup.join(rank, settings.tensor_parallel_size, device, store, settings.collective_timeout_s)
            runner = ModelRunner.load(settings, group)
            runner.warmup()
            if instructions["leader"] is not None:
                send(connection, StepKind.LOADED, Loaded(numerics_id=runner.numerics_id))
            log.info("rank_ready", rank=group.rank, device=str(group.device), kv_blocks=runner.num_blocks)
            follow(runner, connection, partial(pulse.mark_rank, rank))
    except LeaderGone:
        return 0
    except (EngineError, Refused) as error:
        log.error("rank_refused", rank=rank, reason=str(error))
        return EXIT_REFUSED
    except Exception:
        log.exception("rank_failed", rank=rank)
        return 1
    return 0


@contextlib.contextmanager
def _connected(instructions: RankInstructions) -> Iterator[socket.socket]:
    """The connection for steps. Raises Refused, OSError or BadFrame."""
    if (leader := instructions["leader"]) is None:
        with socket.socket(fileno=instructions["socket_fd"]) as connection:
            yield connection
        return
    from specdec.config.nodes import NodeSettings
    from specdec.engine.parallel.frames import StepKind
    from specdec.replica.ranks.connections import NodeConnections, outlast
    from specdec.replica.ranks.messages import Hello, Welcome, receive, send

    nodes = NodeSettings.model_validate_json(leader["nodes"])
    with NodeConnections(nodes).call(leader["host"], nodes.master_port) as connection:
        send(connection, StepKind.HELLO, Hello.model_validate_json(leader["hello"]))
        receive(connection, StepKind.WELCOME, Welcome)
        outlast(connection, nodes.node_timeout_s, timeout_s=None)
        yield connection


def _first_device(settings: EngineSettings, leader: LeaderPlace | None) -> str:
    from specdec.config.nodes import NodeSettings
    from specdec.engine.model.loader import check_tensor_parallel

    num_nodes = 1 if leader is None else NodeSettings.model_validate_json(leader["nodes"]).nnodes
    return check_tensor_parallel(settings, num_nodes)


def _store(instructions: RankInstructions, size: int) -> Store:
    from specdec.engine.parallel.rank_group import local_store, others_store

    if instructions["store_fd"] is not None:
        return local_store(store_path(instructions["store_fd"]), size)
    return others_store(*instructions["store"])


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing torch down takes seconds, and would wait for lost ranks.
    flush_logs()
    os._exit(exit_code)
