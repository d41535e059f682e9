"""A prompt, its greedy continuation and an attached client, for tests of the target's role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specdec.target_service.policy.step_time import StepTimeModel
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import WorkerClient

PROMPT = prompts()[0][:20]


@contextmanager
def target_client(pair: LocalPair, step_time: StepTimeModel) -> Iterator[WorkerClient]:
    """An attached client of the target, whose cost model is `step_time`; checks that its sessions leave nothing."""
    client = WorkerClient(pair, "target")
    client.pair.verifier.steps.pacing.clock.rows = step_time
    client.attach()
    client.turn()
    yield client
    client.end_all()
    client.check_nothing_held()


def continued(pair: LocalPair, num_tokens: int) -> list[int]:
    """The prompt and its greedy continuation."""
    pair.reset()
    body = open_session(PROMPT, max_tokens=num_tokens, ignore_eos=True)
    return [*PROMPT, *pair.run({"a": body}, use_draft=False)["a"].token_ids]


def a_session(max_tokens: int = 60, *, body: dict[str, object] | None = None, **sampling: object) -> pb.OpenSession:
    """A session of `PROMPT`."""
    return open_session(PROMPT, max_tokens=max_tokens, ignore_eos=True, body=body, **sampling)
