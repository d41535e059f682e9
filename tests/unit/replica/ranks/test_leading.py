"""What a leading node demands of the ranks of other nodes, and what it tells them; a rank that is lost in loading."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from specdec.commands.up.cluster import free_port
from specdec.config import TargetSettings
from specdec.config.nodes import NodeSettings
from specdec.engine.errors import EngineError, ModelLoadError
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.frames import StepKind, receive_frame
from specdec.engine.settings import EngineSettings
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.ranks.connections import NodeConnections
from specdec.replica.ranks.leading import Ranks
from specdec.replica.ranks.messages import Hello, Loaded, Welcome, hello_of, receive, send, text_of
from specdec.replica.ranks.watch import RankLost
from specdec.replica.worker import build
from tests.support.engine.tiny_models import save_tiny_model

PATIENCE_S = 20.0


def called(nodes: NodeSettings, hello: Hello) -> tuple[socket.socket, Welcome]:
    """A connection to the leader, which may not listen yet."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = NodeConnections(nodes).call("127.0.0.1", nodes.master_port)
            break
        except OSError:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
    send(connection, StepKind.HELLO, hello)
    return connection, receive(connection, StepKind.WELCOME, Welcome)


class Follower(threading.Thread):
    """Node 1, whose rank computes in its own way; it stays until it is let go."""

    def __init__(self, nodes: NodeSettings, engine: EngineSettings) -> None:
        super().__init__(daemon=True)
        self._nodes, self._engine = nodes.model_copy(update={"node_rank": 1}), engine
        self.told: queue.Queue[tuple[StepKind, str]] = queue.Queue()
        """What the leader says after the rank has loaded."""
        self.may_go = threading.Event()

    def run(self) -> None:
        hello = hello_of(self._nodes, self._engine)
        node, welcome = called(self._nodes, hello)
        rank, _ = called(self._nodes, hello.model_copy(update={"rank": 1, "token": welcome.token}))
        with node, rank:
            send(rank, StepKind.LOADED, Loaded(numerics_id="theirs"))
            node.settimeout(PATIENCE_S)
            while (frame := receive_frame(node)).kind is StepKind.BEAT:
                pass
            self.told.put((frame.kind, text_of(frame)))
            self.may_go.wait(PATIENCE_S)


class EndedWatch(Ranks):
    """Ranks whose watch has ended as soon as the nodes are there, before it sends what it is told."""

    def _await_nodes(self, store_port: int, wait_s: float) -> None:
        super()._await_nodes(store_port, wait_s)
        self._watch.stop()
        self._watching.join(PATIENCE_S)


@pytest.mark.parametrize("ours", ["ours", "theirs"])
def test_a_node_whose_rank_computes_differently_is_told_why_the_group_ends(ours: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    engine = EngineSettings(model=str(tmp_path), tensor_parallel_size=2)
    given = {"host": "127.0.0.1", "master_addr": "127.0.0.1", "nnodes": 2, "master_port": free_port()}
    nodes = NodeSettings.model_validate(given)
    before = signal.getsignal(signal.SIGUSR1)
    kind = EndedWatch if ours == "ours" else Ranks
    ranks = kind(engine, "cpu", nodes, ("target", "info", "json"), lambda reason: None, Pulse())
    follower = Follower(nodes, engine)
    follower.start()
    try:
        ranks.start(PATIENCE_S)
        if ours == "theirs":
            ranks.confirm(ours)
            assert follower.told.get(timeout=PATIENCE_S) == (StepKind.READY, "")
        else:
            with pytest.raises(EngineError, match="rank 1 computes as theirs and the leader as ours") as caught:
                ranks.confirm(ours)
    finally:
        ranks.stop()
        signal.signal(signal.SIGUSR1, before)
    if ours == "ours":
        assert follower.told.get(timeout=PATIENCE_S) == (StepKind.REFUSED, str(caught.value))
    follower.may_go.set()
    follower.join(PATIENCE_S)


def test_a_rank_that_is_lost_while_the_model_is_read_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_args: Any, **_named: Any) -> None:
        raise RankLost("rank 1 was killed by SIGKILL")  # as a signal's handler does

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(RankLost):
        ModelRunner.load(EngineSettings(model=str(save_tiny_model("llama", tmp_path)), device="cpu"))


def test_a_collective_of_loading_that_fails_as_a_rank_is_lost_is_told_as_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TargetSettings(model="models/target")
    ranks = Ranks(EngineSettings(model="models/target"), "cpu", NodeSettings(), ("", "", ""), lambda _: None, Pulse())
    ranks._lost_reason = "rank 1 was killed by SIGKILL"
    ranks._lost.set()

    @contextlib.contextmanager
    def leading(*_args: Any) -> Iterator[Ranks]:
        yield ranks

    def load(*_args: Any, **_named: Any) -> None:
        raise ModelLoadError("could not be loaded") from RuntimeError("Connection closed by peer")

    monkeypatch.setattr(build, "lead_ranks", leading)
    monkeypatch.setattr(build, "build_engine", load)
    port: Any = type("Port", (), {"pulse": ranks.pulse})
    with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
        build.run_role(port, settings, Any, "target", Any)  # type: ignore[arg-type]
