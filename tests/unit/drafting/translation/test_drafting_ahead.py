"""A draft with another tokenizer draws several of the target's tokens per call, and grows the trees of single draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.drafting.translation.runner import TranslatingRunner, drawn_ids
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.native import DrawingDecoder
from specdec.engine.model.runner import ModelRunner
from tests.support.engine.device_drawing import device_drawing_of
from tests.support.engine.drafting_ahead import MAX_AHEAD, assert_alike, assert_same_guesses, client_of, plain, settle
from tests.support.engine.local_pair import MODELS, LocalPair, open_session, prompts
from tests.support.engine.other_tokenizers import draft_of_another_family, draft_with_fewer_tokens, permuted_draft
from tests.support.engine.triton_device import DEVICE

MAKERS = {
    "permuted": permuted_draft,
    "fewer tokens": lambda folder: draft_with_fewer_tokens(folder, 900),
    "another family": lambda folder: draft_of_another_family(folder, [(MODELS / "evaluate.py").read_text()]),
}


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rounds a call has does not depend on the clock."""
    monkeypatch.setattr(DrawingDecoder, "most_call_s", 3600.0)


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalPair:
    folder = MAKERS[request.param](tmp_path_factory.mktemp("other") / "draft")
    options = {"heterogeneous_vocab": "intersection", "max_ahead_tokens": MAX_AHEAD}
    pair = LocalPair(draft=str(folder), draft_options=options)
    if not isinstance(pair.draft_built.drawing, DrawingDecoder):
        pytest.skip("no native kernels")
    return pair


@given(seed=st.integers(0, 2**32), max_heads=st.sampled_from([1, 3]))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_trees_are_those_of_single_draws(pair: LocalPair, seed: int, max_heads: int) -> None:
    assert_alike(pair, seed, plain, max_heads)


def test_several_tokens_take_one_step_of_the_engine(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_steps(*, is_ahead: bool) -> int:
        client = client_of(pair, is_ahead=is_ahead, max_heads=1, min_path_score=0.0)
        client.entry("s", open=open_session(prompts()[0][:20], max_tokens=60, ignore_eos=True))
        outputs = []
        with monkeypatch.context() as patched:
            collect = client.engine.collect
            patched.setattr(client.engine, "collect", lambda *args: outputs.append(collect(*args)) or outputs[-1])
            settle(client)
        client.end_all()
        return len([output for output in outputs if output is not None])

    assert num_steps(is_ahead=True) < num_steps(is_ahead=False) == MAX_AHEAD


def test_trees_are_those_of_single_draws_where_a_captured_graph_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE != "cpu":
        pytest.skip("kernels are interpreted on a CPU")
    monkeypatch.setattr(DeviceDrawing, "most_call_s", 3600.0)
    monkeypatch.setattr(DeviceDrawing, "prepare", lambda self, num_top: None)
    folder = draft_with_fewer_tokens(tmp_path / "draft", 900)
    options = {"heterogeneous_vocab": "intersection", "max_ahead_tokens": MAX_AHEAD}
    pair = LocalPair(draft=str(folder), draft_options=options)
    runner, translated = pair.draft_built.engine.runner, pair.translated
    assert isinstance(runner, TranslatingRunner)
    assert isinstance(runner._runner, ModelRunner)
    assert translated is not None
    drawing, captures = device_drawing_of(runner._runner)
    ids = drawn_ids(translated.vocabulary, translated.vocabulary.num_target)
    object.__setattr__(pair.draft_built, "drawing", drawing.by_ids(ids))
    pair.reset()
    assert_same_guesses(pair, 3, [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.5}], 2)
    assert captures.num_replayed > 10
