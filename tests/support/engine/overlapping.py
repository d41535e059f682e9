"""A target on a late device, and actions while the device computes a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.v1 import common_pb2 as pb
from tests.support.engine.late_device import LateDevice, put_on_late_device
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.targets import PROMPT
from tests.support.engine.worker_client import WorkerClient

OTHER = prompts()[1][:25]


def loaded_on_late_device() -> tuple[LocalPair, LateDevice]:
    """A pair whose target runs on a late device, and that device."""
    pair = LocalPair(hold_off_ms=0.0, max_sessions=4)
    return pair, put_on_late_device(pair, 240)


def undisturbed(device: LateDevice) -> LateDevice:
    """The device, without actions while it computes."""
    device.meanwhile, device.before_compute, device.num_looks = lambda: None, lambda batch: None, lambda: 100
    return device


def truth_of(pair: LocalPair, device: LateDevice) -> dict[str, list[int]]:
    """Prompts with their greedy continuations, computed without late passes."""
    engine = pair.target_built.engine
    engine.launch_pass = None
    pair.reset()
    bodies = {"s": a_session(), "other": a_session(OTHER)}
    outcomes = pair.run(bodies, use_draft=False)
    engine.launch_pass = device.launch
    return {name: [*body.token_ids, *outcomes[name].token_ids] for name, body in bodies.items()}


def a_session(prompt: list[int] = PROMPT, **options: Any) -> pb.OpenSession:
    return open_session(prompt, max_tokens=40, ignore_eos=True, **options)


def once(act: Callable[[], None], *, after: int = 0) -> Callable[[], None]:
    """An action for `LateDevice.meanwhile` that acts once, in the step after `after` others."""
    num_calls = 0

    def meanwhile() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == after + 1:
            act()

    return meanwhile


def tokens_of(client: WorkerClient, session_id: str = "s") -> list[int]:
    return [token for verdict in client.take("verdict", session_id) for token in verdict.token_ids]
