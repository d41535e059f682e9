"""Log-probabilities of a prompt travel in parts: bounded, in order, as far as credit allows, sent again and never
computed again; and they are what they are when all come at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.rpc import code_pb2

from specdec.replica.bridge.frames import FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES
from specdec.wire.sampling_limits import MAX_LOGPROBS
from tests.support.engine.exact_runner import evict_all
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import WorkerClient, fields_of, reason_of

NUM_TOP = 20
PROMPT = [token for prompt in prompts()[:12] for token in prompt][:700]
STEP = 128
"""Rows of a step: `max_batch_tokens` of the pair."""
UNLIMITED = 10**6


@pytest.fixture(scope="module")
def loaded_pair() -> LocalPair:
    return LocalPair(hold_off_ms=0.0)


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    evict_all(loaded_pair.target_built.engine.block_pool)
    client = WorkerClient(loaded_pair, "target")
    client.attach(max_message_bytes=MIN_MESSAGE_BYTES)
    yield client
    client.end_all()
    client.check_nothing_held()


@pytest.fixture(scope="module")
def truth(loaded_pair: LocalPair) -> list[bytes]:
    """What an owner gets that knows no parts."""
    client = WorkerClient(loaded_pair, "target")
    client.attach()
    client.entry("s", open=a_session(prompt_logprobs_credit=None))
    client.turn(10)
    [*_, first] = [verdict for verdict in client.take("verdict") if verdict.prompt_logprobs]
    client.end_all()
    return encoded(first.prompt_logprobs)


def a_session(max_tokens: int = 3, prompt: list[int] | None = None, **body: object) -> pb.OpenSession:
    wanted = {"num_prompt_logprobs": NUM_TOP, "prompt_logprobs_credit": UNLIMITED, **body}
    given = {name: value for name, value in wanted.items() if value is not None}
    return open_session(prompt or PROMPT, max_tokens=max_tokens, ignore_eos=True, body=given)


def encoded(positions: object) -> list[bytes]:
    return [position.SerializeToString() for position in positions]  # type: ignore[attr-defined]


def taken(client: WorkerClient, session_id: str = "s", start: int = 1) -> list[bytes]:
    """The positions of the parts that came, which must follow each other."""
    found: list[bytes] = []
    for part in client.take("prompt_logprobs", session_id):
        assert part.start_position == start + len(found)
        assert part.positions
        found += encoded(part.positions)
    return found


def test_parts_are_bounded_in_order_before_the_first_verdict_and_the_same_as_all_at_once(
    client: WorkerClient, truth: list[bytes]
) -> None:
    client.entry("s", open=a_session())
    client.turn(10)
    kinds = [result.WhichOneof("result") for result in client.results]
    assert kinds[0] == "opened"
    assert kinds.count("prompt_logprobs") > len(PROMPT) // STEP
    assert set(kinds[kinds.index("verdict") :]) == {"verdict"}
    assert not any(verdict.prompt_logprobs for verdict in client.take("verdict"))
    assert taken(client) == truth
    assert max(client.message_bytes) <= MIN_MESSAGE_BYTES
    assert sum(map(len, truth)) > 2 * MIN_MESSAGE_BYTES


def test_one_step_of_many_sessions_is_split_into_messages_that_the_owner_takes(
    client: WorkerClient, truth: list[bytes]
) -> None:
    for i in range(6):
        client.entry(f"s{i}", open=a_session(40, PROMPT[: 20 + i], num_prompt_logprobs=MAX_LOGPROBS))
    client.turn(60)
    assert max(client.message_bytes) <= MIN_MESSAGE_BYTES
    assert sum(client.message_bytes) > 4 * MIN_MESSAGE_BYTES
    for i in range(6):
        assert len(taken(client, f"s{i}")) == 19 + i
        assert sum(len(verdict.token_ids) for verdict in client.take("verdict", f"s{i}")) == 40


def test_nothing_is_computed_past_the_credit_but_the_step_that_reaches_it(
    client: WorkerClient, truth: list[bytes]
) -> None:
    client.entry("s", open=a_session(prompt_logprobs_credit=200))
    client.turn(10)
    found = taken(client)
    assert 199 <= len(found) < 200 + STEP
    assert not client.take("verdict")
    computed = client.session().seq.num_computed_tokens
    client.turn(5)
    assert client.session().seq.num_computed_tokens == computed
    client.entry("s", credit=pb.Credit(prompt_logprobs_position=UNLIMITED))
    client.turn(10)
    assert found + taken(client, start=1 + len(found)) == truth
    assert len(client.take("verdict")) == 3


def test_credit_for_tokens_is_no_credit_for_the_prompt(client: WorkerClient) -> None:
    client.entry("s", open=a_session(prompt_logprobs_credit=2))
    client.turn(3)
    client.entry("s", credit=pb.Credit(position=UNLIMITED))
    client.turn(10)
    assert len(taken(client)) < 2 + STEP
    assert not client.take("verdict")


def test_what_was_not_acknowledged_is_sent_again_and_nothing_is_computed_again(
    client: WorkerClient, truth: list[bytes]
) -> None:
    client.entry("s", open=a_session(prompt_logprobs_credit=400))
    client.turn(10)
    found = taken(client)
    acknowledged, seen = 101, 230
    client.entry("s", credit=pb.Credit(acknowledged_prompt_logprobs_position=acknowledged))
    client.frame(FrameKind.STREAM_CLOSED)
    client.turn()
    computed = client.session().seq.num_computed_tokens
    client.attach(2, held={"s": (1, len(PROMPT))}, prompt_position=seen, max_message_bytes=MIN_MESSAGE_BYTES)
    client.turn(3)
    assert client.session().seq.num_computed_tokens == computed
    parts = client.take("prompt_logprobs")
    assert parts[0].start_position <= seen < parts[0].start_position + len(parts[0].positions)
    again = [position for part in parts for position in encoded(part.positions)]
    assert again == found[parts[0].start_position - 1 :]
    client.entry("s", stream_id=2, credit=pb.Credit(prompt_logprobs_position=UNLIMITED))
    client.turn(10)
    assert found + taken(client, start=1 + len(found)) == truth


def test_what_was_acknowledged_is_not_kept(client: WorkerClient) -> None:
    client.entry("s", open=a_session(300))
    client.turn(10)
    client.entry("s", credit=pb.Credit(acknowledged_prompt_logprobs_position=len(PROMPT)))
    client.turn()
    prompt = client.session().prompt_logprobs
    assert list(prompt.unseen(0)) == []
    assert prompt.is_complete


def test_a_session_that_is_preempted_in_the_middle_goes_on_where_it_was(
    client: WorkerClient, truth: list[bytes]
) -> None:
    client.entry("s", open=a_session(prompt_logprobs_credit=200))
    client.turn(10)
    found = taken(client)
    client.engine.scheduler.preempt(client.session().seq)
    evict_all(client.engine.block_pool)
    client.entry("s", credit=pb.Credit(prompt_logprobs_position=UNLIMITED))
    client.turn(15)
    assert found + taken(client, start=1 + len(found)) == truth


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("start", [2, 129, 400, 699])
def test_another_replica_goes_on_where_the_first_was_killed(
    client: WorkerClient, truth: list[bytes], start: int, is_cached: bool
) -> None:
    if is_cached:
        client.entry("before", open=a_session())
        client.turn(10)
        client.take("prompt_logprobs", "before")
    client.entry("s", open=a_session(100, prompt_logprobs_start=start))
    client.turn(10)
    assert taken(client, start=start) == truth[start - 1 :]
    cached = client.session().seq.num_cached_tokens
    assert cached <= start - 1
    assert (cached > 0) == (is_cached and start > 16)


def test_a_session_with_output_describes_its_prompt_too_if_that_is_still_wanted(
    client: WorkerClient, truth: list[bytes]
) -> None:
    client.entry("a", open=a_session(4))
    client.turn(10)
    tokens = [token for verdict in client.take("verdict", "a") for token in verdict.token_ids]
    body = a_session(4, prompt_logprobs_start=300)
    body.token_ids.extend(tokens[:2])
    client.entry("s", open=body)
    client.turn(10)
    assert taken(client, start=300) == truth[299:]
    assert [token for verdict in client.take("verdict") for token in verdict.token_ids] == tokens[2:]


@pytest.mark.parametrize("start", [700, 701, 2**32 - 1])
def test_nothing_is_told_of_a_prompt_of_which_all_has_arrived(client: WorkerClient, start: int) -> None:
    client.entry("s", open=a_session(prompt_logprobs_start=start))
    client.turn(10)
    assert client.take("prompt_logprobs") == []
    assert len(client.take("verdict")) == 3


def test_forks_of_a_prompt_that_is_described_wait_for_it_and_share_it(client: WorkerClient) -> None:
    client.entry("s", open=a_session())
    client.entry("t", open=a_session(num_prompt_logprobs=None, prompt_logprobs_credit=None, fork_from="s"))
    client.turn(10)
    assert len(taken(client)) == len(PROMPT) - 1
    assert client.take("prompt_logprobs", "t") == []
    ours, theirs = client.take("verdict"), client.take("verdict", "t")
    assert [v.token_ids for v in ours] == [v.token_ids for v in theirs]


def test_an_owner_that_knows_no_parts_and_takes_too_little_loses_that_session_alone(client: WorkerClient) -> None:
    client.entry("s", open=a_session(prompt_logprobs_credit=None))
    client.entry("t", open=a_session(10, PROMPT[:30], num_prompt_logprobs=None))
    client.turn(20)
    [error] = client.take("error")
    assert error.status.code == code_pb2.FAILED_PRECONDITION
    assert reason_of(error.status) == "MESSAGE_TOO_LARGE"
    assert client.session() is None
    assert client.aborts == {}
    assert sum(len(verdict.token_ids) for verdict in client.take("verdict", "t")) == 10
    assert max(client.message_bytes) <= MIN_MESSAGE_BYTES


@pytest.mark.parametrize("field", ["num_prompt_logprobs", "sampling.num_logprobs"])
def test_more_alternatives_than_any_message_holds_are_refused(client: WorkerClient, field: str) -> None:
    body = a_session()
    holder = body.sampling if field.startswith("sampling") else body
    setattr(holder, field.split(".")[-1], MAX_LOGPROBS + 1)
    client.entry("s", open=body)
    client.turn()
    assert fields_of(client.take("error")[0].status) == [f"open.{field}"]
