"""A rank that never arrives in a captured all-reduce: no library's timeout ends the others' wait, so the watch must."""

from __future__ import annotations

import itertools
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from specdec.engine.batch import Batch
from specdec.engine.leading_runner import LeadingRunner, follow
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.kv_budget import largest_batch
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.frames import StepFrame, StepKind
from specdec.replica.bridge.engine_watch import EndCause, EngineWatch, Stall
from specdec.replica.bridge.pulse import Pulse
from tests.support.engine.triton_device import DEVICE
from tests.support.fake_cuda.install import fake_cuda
from tests.support.fake_cuda.runners import warm_runner

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real one")

NUM_STEPS, PATIENCE_S = 3, 60.0


class Ended(Exception):
    """The servicer ends the engine, which waits in the all-reduce."""


class OtherRank:
    """Rank 1, whose launches arrive in the all-reduce until it hangs before one."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.arrived, self.is_hanging, self.may_end = (threading.Semaphore(0), threading.Event(), threading.Event())
        self.num_steps = 0

    def forward(self, batch: Batch) -> None:
        """Launch a step."""
        self.num_steps += 1
        if self.num_steps == NUM_STEPS:
            self.is_hanging.set()
            self.may_end.wait(PATIENCE_S)
        self.arrived.release()


def test_a_rank_that_never_arrives_in_a_captured_all_reduce_is_named_with_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse, other, clock_s = Pulse(), OtherRank(), itertools.count()
    pulse.expect_ranks(2)
    watch, found = EngineWatch(4.0, 6.0, lambda: float(next(clock_s))), list[Stall]()
    is_led = False

    def all_reduce(*tensors: torch.Tensor) -> None:
        """Wait for the other rank without any limit, as NCCL does in a replay; meanwhile the servicer watches."""
        while is_led and not other.arrived.acquire(timeout=0.05):
            if not other.is_hanging.is_set():
                continue
            for beat in itertools.count():
                if stall := watch.look(pulse.read()._replace(num_beats=beat)):
                    found.append(stall)
                    raise Ended

    compute = DeviceDecoder.__call__

    def computed(self: DeviceDecoder, *arguments: Any, **named: Any) -> torch.Tensor:
        logits: torch.Tensor = compute(self, *arguments, **named)
        device.put_launch("all_reduce", all_reduce, (logits,))
        return logits

    ours, theirs = socket.socketpair()
    with ours, theirs, fake_cuda() as device:
        monkeypatch.setattr(DeviceDecoder, "__call__", computed)
        runner = warm_runner("llama", tmp_path, monkeypatch, self_test=False)
        assert runner.num_graphs
        is_led = True
        leading = LeadingRunner(runner, [ours], partial(pulse.mark_rank, 0))
        rank = partial(follow, cast(ModelRunner, other), theirs, partial(pulse.mark_rank, 1))
        thread = threading.Thread(target=rank, daemon=True)
        thread.start()
        batch, _ = largest_batch(1, 8, runner.block_size, torch.device("cpu"))
        for _ in range(NUM_STEPS - 1):
            pulse.begin_turn()
            leading.launch(batch).logits().cpu()
            pulse.end_turn()
        pulse.begin_turn()
        launched = leading.launch(batch)  # returns, as on a GPU
        with pytest.raises(Ended):
            launched.logits().cpu()
        device.default.todo.clear()
        ours.sendall(StepFrame(StepKind.STOP, (), bytearray()).encode())
        other.may_end.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert found[0].cause is EndCause.STUCK
    assert found[0].reason.endswith(f"6.0 s (engine_stall_s): step {NUM_STEPS} is not launched by rank 1")
