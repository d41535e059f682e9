"""What a node notices of its ranks and of other nodes."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from specdec.engine.parallel.frames import StepFrame, StepKind, receive_frame
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.ranks.messages import send
from specdec.replica.ranks.watch import GroupWatch, Loss
from tests.support.for_each import for_each

PATIENCE_S = 20.0
SOON_S = 3.5
"""Limit of a node's silence, longer than three beats."""


def outcome(watch: GroupWatch, on_frame: Callable[[StepFrame], None] = lambda frame: None) -> Callable[[], Loss | None]:
    """Run a watch in a thread; the result waits for its end."""
    ended: list[Loss | None] = []
    thread = threading.Thread(target=lambda: ended.append(watch.run(on_frame)), daemon=True)
    thread.start()

    def result() -> Loss | None:
        thread.join(PATIENCE_S)
        watch.close()
        (loss,) = ended
        return loss

    return result


def say_lost(there: socket.socket) -> None:
    send(there, StepKind.LOST, "rank 3 was killed by SIGKILL\nTraceback")


def say_marks(there: socket.socket) -> None:
    send(there, StepKind.BEAT, "2:7 64:1")


def say_nothing_of_ranks(there: socket.socket) -> None:
    send(there, StepKind.BEAT, "2:7:1 x")


def say_noise(there: socket.socket) -> None:
    there.sendall(b"\xff" * 72)


@for_each(
    "act, reason",
    [
        (socket.socket.close, "node 1 closed its connection"),
        (say_lost, "node 1: rank 3 was killed by SIGKILL Traceback"),
        (say_marks, "node 1: a beat with marks of no rank"),
        (say_nothing_of_ranks, "node 1: a beat with marks of no rank"),
        (say_noise, "node 1: -1 is not a valid StepKind"),
    ],
)
def test_a_node_that_leaves_is_a_loss_with_its_reason(act: Callable[[socket.socket], None], reason: str) -> None:
    here, there = socket.socketpair()
    watch = GroupWatch(math.inf, math.inf)
    watch.add_node("node 1", here)
    result = outcome(watch)
    act(there)
    lost = result()
    there.close()
    assert lost == Loss(reason)


def test_a_silent_node_is_a_loss_and_one_that_beats_is_none() -> None:
    (here, there), (mine, yours) = socket.socketpair(), socket.socketpair()
    watch, other = GroupWatch(math.inf, SOON_S), GroupWatch(math.inf, SOON_S)
    watch.add_node("the silent one", here)
    watch.add_node("the living one", mine)
    other.add_node("its peer", yours)
    result, living = outcome(watch), outcome(other)
    lost = result()
    assert lost is not None
    assert lost.reason.startswith("the silent one has been silent for ")
    assert receive_frame(there).kind is StepKind.BEAT
    ended = living()
    assert ended is not None
    assert ended.reason in ("its peer closed its connection", "its peer is not reached: [Errno 32] Broken pipe")
    there.close()


def test_frames_reach_nodes_and_their_frames_are_handed_over() -> None:
    here, there = socket.socketpair()
    seen: list[StepKind] = []
    watch = GroupWatch(math.inf, math.inf)
    watch.add_node("node 1", here)
    has_seen = threading.Event()

    def on_frame(frame: StepFrame) -> None:
        seen.append(frame.kind)
        has_seen.set()

    result = outcome(watch, on_frame)
    send(there, StepKind.BEAT)
    send(there, StepKind.READY)
    assert has_seen.wait(PATIENCE_S)
    watch.tell(StepFrame(StepKind.READY, (), bytearray()))
    with closing(there):
        while receive_frame(there).kind is not StepKind.READY:
            pass
        watch.stop()
        assert result() is None
    assert seen == [StepKind.READY]


@pytest.mark.parametrize(("code", "reason"), [("raise SystemExit(4)", "rank 2 exited with code 4"), (None, "SIGKILL")])
def test_a_process_that_ends_is_a_loss(code: str | None, reason: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code or "import signal; signal.pause()"])
    watch = GroupWatch(math.inf, math.inf)
    watch.add_process(2, process)
    result = outcome(watch)
    if code is None:
        os.kill(process.pid, signal.SIGKILL)
    lost = result()
    assert lost is not None
    assert reason in lost.reason
    assert lost.fields["pid"] == process.pid


def test_beats_carry_the_marks_of_a_nodes_ranks_to_the_leader() -> None:
    here, there = socket.socketpair()
    of_leader, of_node = Pulse(), Pulse()
    of_node.mark_rank(3, 17)
    leader, node = GroupWatch(math.inf, math.inf, of_leader), GroupWatch(math.inf, math.inf, of_node)
    leader.add_node("node 1", here)
    node.add_node("the leader", there)
    with subprocess.Popen(["sleep", "600"]) as rank:
        node.add_process(3, rank)
        results = outcome(leader), outcome(node)
        while of_leader.marks[3] != 17:
            threading.Event().wait(0.02)
        rank.kill()
        assert results[1]() == Loss(
            "rank 3 was killed by SIGKILL", {"rank": 3, "pid": rank.pid, "exit_code": -signal.SIGKILL}
        )
    leader.stop()
    results[0]()
