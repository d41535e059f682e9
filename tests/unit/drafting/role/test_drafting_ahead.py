"""A draft that guesses several tokens per native call grows the trees that it grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.native import DrawingDecoder
from specdec.engine.errors import KVInvariantError
from specdec.engine.model.runner import ModelRunner
from specdec.v1 import common_pb2 as pb
from tests.support.engine.device_drawing import device_drawing_of
from tests.support.engine.drafting_ahead import MAX_AHEAD, assert_alike, assert_same_guesses, client_of, plain, settle
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.triton_device import DEVICE
from tests.support.engine.worker_client import WorkerClient

examples = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))

others: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {278: 2.0}},
    {"temperature": 1.0, "verify_mode": pb.VERIFY_MODE_REJECTION, "body": {"max_draft_tokens": 4}},
    {"temperature": 1.0, "body": {"max_draft_tokens": 0}},
]


def rejected(**sampling: Any) -> dict[str, Any]:
    """Of a session for rejection verification."""
    return {"verify_mode": pb.VERIFY_MODE_REJECTION, "body": {"max_draft_tokens": 7}, **sampling}


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rounds a call has does not depend on the clock."""
    monkeypatch.setattr(DrawingDecoder, "most_call_s", 3600.0)


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return needs_kernels(LocalPair(draft_options={"max_ahead_tokens": MAX_AHEAD}))


@pytest.fixture(scope="module")
def tight_pair() -> LocalPair:
    """Blocks for two sessions at most, and rows for less than a prompt."""
    tight = {"num_blocks": 8, "max_batch_tokens": 20, "max_batch_seqs": 3, "max_ahead_tokens": MAX_AHEAD}
    return needs_kernels(LocalPair(draft_options=tight))


@pytest.fixture(scope="module")
def short_pair() -> LocalPair:
    """A context that ends soon."""
    return needs_kernels(LocalPair(draft_options={"max_model_len": 40, "max_ahead_tokens": MAX_AHEAD}))


@pytest.fixture(scope="module")
def graph_pair() -> LocalPair:
    """A draft that draws as on a GPU, in one captured graph per call."""
    if DEVICE != "cpu":
        pytest.skip("kernels are interpreted on a CPU")
    pair = needs_kernels(LocalPair(draft_options={"max_ahead_tokens": MAX_AHEAD}))
    runner = pair.draft_built.engine.runner
    assert isinstance(runner, ModelRunner)
    object.__setattr__(pair.draft_built, "drawing", device_drawing_of(runner)[0])
    return pair


def needs_kernels(pair: LocalPair) -> LocalPair:
    if pair.draft_built.drawing is None:
        pytest.skip("no native kernels")
    return pair


@pytest.mark.parametrize("max_heads", [1, 2, 6])
@given(seed=st.integers(0, 2**32))
@settings(examples)
def test_trees_of_plain_sessions_are_alike(pair: LocalPair, seed: int, max_heads: int) -> None:
    assert_alike(pair, seed, plain, max_heads)


@given(seed=st.integers(0, 2**32))
@settings(examples)
def test_trees_are_alike_when_everything_is_worth_following(pair: LocalPair, seed: int) -> None:
    assert_alike(pair, seed, plain, 8, min_path_score=0.0, min_branch_score=0.0)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param([{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.5}], marks=pytest.mark.long),
        [{"temperature": 0.0}, others[0], others[1], {"temperature": 0.7, "frequency_penalty": 0.4, "min_tokens": 9}],
        [rejected(temperature=0.3), rejected(temperature=0.8), rejected(temperature=1.0, repetition_penalty=1.2)],
    ],
    ids=["plain", "adjusted", "rejection"],
)
def test_trees_are_alike_where_a_captured_graph_draws(
    sampling: list[dict[str, Any]], graph_pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceDrawing, "most_call_s", 3600.0)
    monkeypatch.setattr(DeviceDrawing, "prepare", lambda self, num_top: None)
    drawing = graph_pair.draft_built.drawing
    assert isinstance(drawing, DeviceDrawing)
    captures = drawing._steps.capture
    num_before = captures.num_replayed  # type: ignore[attr-defined]
    assert_alike(graph_pair, 3, sampling, 1)  # what has cuts would take long
    assert captures.num_replayed > num_before + 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("max_heads", [2, 6])
@given(seed=st.integers(0, 2**32))
@settings(examples)
def test_guesses_are_the_same_where_rounds_go_on_past_forks(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, seed: int, max_heads: int
) -> None:
    monkeypatch.setattr(DrawingDecoder, "ends_at_forks", False)
    monkeypatch.setattr(DrawingDecoder, "most_rounds", 8)
    assert_same_guesses(pair, seed, plain, max_heads)
    assert_same_guesses(pair, seed, plain + others, max_heads, min_path_score=0.1, min_branch_score=0.1)


def test_guesses_are_the_same_where_rounds_go_on_past_forks_and_blocks_run_out(
    tight_pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawingDecoder, "ends_at_forks", False)
    for seed in range(6):
        assert_same_guesses(tight_pair, seed, plain, 3)


def test_guesses_are_the_same_where_a_captured_graph_goes_on_past_forks(
    graph_pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceDrawing, "most_call_s", 3600.0)
    monkeypatch.setattr(DeviceDrawing, "prepare", lambda self, num_top: None)
    assert_same_guesses(graph_pair, 5, [{"temperature": 0.0}, {"temperature": 1.0}, others[0]], 3)


@given(seed=st.integers(0, 2**32))
@settings(examples)
def test_trees_are_alike_beside_sessions_that_are_guessed_one_by_one(pair: LocalPair, seed: int) -> None:
    assert_alike(pair, seed, plain + others, 3)


@given(seed=st.integers(0, 2**32))
@settings(examples)
def test_trees_are_alike_where_blocks_run_out(tight_pair: LocalPair, seed: int) -> None:
    assert_alike(tight_pair, seed, plain, 1)


@given(seed=st.integers(0, 2**32))
@settings(examples)
def test_trees_are_alike_where_contexts_end(short_pair: LocalPair, seed: int) -> None:
    assert_alike(short_pair, seed, plain, 2)


@pytest.fixture
def drafting(pair: LocalPair) -> Iterator[Callable[..., WorkerClient]]:
    """A client with an open session."""

    def start(*, is_ahead: bool = True, **sampling: Any) -> WorkerClient:
        client = client_of(pair, is_ahead=is_ahead, max_heads=1, min_path_score=0.0)
        body = open_session(prompts()[0][:20], max_tokens=60, ignore_eos=True, **sampling)
        client.entry("s", open=body)
        return client

    yield start
    pair.reset()


def num_steps(client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps until nothing is left to draft."""
    collect, outputs = client.engine.collect, []
    monkeypatch.setattr(client.engine, "collect", lambda: outputs.append(collect()) or outputs[-1])
    settle(client)
    monkeypatch.undo()
    monkeypatch.setattr(DrawingDecoder, "most_call_s", 3600.0)
    return len(outputs)


def test_a_chain_takes_fewer_steps_than_it_has_tokens(
    drafting: Callable[..., WorkerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_steps(drafting(is_ahead=False), monkeypatch) == MAX_AHEAD
    client = drafting()
    client.pair.drafter._ahead._round_s = {1: 1e-9}
    assert num_steps(client, monkeypatch) == 3, "9 tokens, in calls of 4 rounds"


@pytest.mark.parametrize("sampling", others[:2], ids=["penalty", "bias"])
def test_where_logits_are_adjusted_every_token_takes_a_step(
    drafting: Callable[..., WorkerClient], monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    assert num_steps(drafting(**sampling), monkeypatch) == MAX_AHEAD


def test_rounds_that_take_too_long_are_computed_one_by_one_and_tried_again_later(
    drafting: Callable[..., WorkerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = drafting()
    ahead = client.pair.drafter._ahead
    ahead._round_s = {1: 3600.0 * 0.6}
    assert ahead._num_rounds(1) == 1
    tries = [ahead._num_rounds(1) for _ in range(4)]
    assert tries == sorted(tries)
    assert tries[-1] == 2


def test_while_another_sequence_waits_for_its_step_there_is_one_round(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(pair, is_ahead=True, max_heads=1, min_path_score=0.0)
    for name in "ab":
        body = open_session(prompts()[0][:20], max_tokens=60, ignore_eos=True)
        client.entry(name, open=body)
        client.turn()
    settle(client)
    lengths = []
    for name in "ab":
        session = client.session(name)
        session.apart_until = 10_000
        client.entry(name, commit=pb.Commit(start_position=20, token_ids=[7]))
    client.turn()
    for _ in range(4):
        lengths.append([len(client.session(name).main_path) for name in "ab"])
        client.turn()
    assert all(abs(a - b) <= 1 for a, b in lengths), "each has its turn after every token"
    settle(client)
    client.end_all()


def test_a_call_that_raises_costs_nobody_anything(
    drafting: Callable[..., WorkerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = settle(drafting(is_ahead=False))
    client = drafting()

    def raising(*_: Any) -> Any:
        raise ValueError("poison")

    monkeypatch.setattr(client.pair.draft_built.drawing, "draw", raising)
    assert settle(client) == expected


def test_a_fault_of_the_engine_itself_ends_it(
    drafting: Callable[..., WorkerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = drafting()

    def raising(*_: Any) -> Any:
        raise KVInvariantError("write")

    monkeypatch.setattr(client.engine.ahead, "reserve", raising)
    with pytest.raises(KVInvariantError):
        client.turn(3)
