"""Colouring text by the origin of its tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.commands.views.origins import HALF_CHARACTER, OriginPainter
from specdec.v1 import common_pb2, coordinator_pb2

DRAFT, BONUS, DECODE = common_pb2.ORIGIN_DRAFT, common_pb2.ORIGIN_BONUS, common_pb2.ORIGIN_DECODE


def delta(text: str, *tokens: tuple[str, int]) -> coordinator_pb2.ChoiceDelta:
    message = coordinator_pb2.ChoiceDelta(text=text)
    for token_text, origin in tokens:
        message.tokens.add(text=token_text, origin=common_pb2.Origin.Name(origin))
    return message


def test_each_token_is_a_span_of_its_origin() -> None:
    painter = OriginPainter()
    assert painter.paint(delta("return x", ("return", DRAFT), (" x", BONUS))) == [
        ("return", DRAFT),
        (" x", BONUS),
    ]


def test_text_held_back_keeps_the_origin_of_its_token() -> None:
    painter = OriginPainter()
    assert painter.paint(delta("re", ("return", DRAFT), (" x", BONUS))) == [("re", DRAFT)]
    assert painter.paint(delta("turn x")) == [("turn", DRAFT), (" x", BONUS)]


def test_a_character_split_over_tokens_takes_the_first_ones_origin() -> None:
    painter = OriginPainter()
    assert painter.paint(delta("", (HALF_CHARACTER, DRAFT))) == []
    assert painter.paint(delta("é!", (HALF_CHARACTER, BONUS), ("!", DECODE))) == [("é", DRAFT), ("!", DECODE)]


def test_special_tokens_without_text_are_passed_over() -> None:
    painter = OriginPainter()
    assert painter.paint(delta("a", ("<eos>", DRAFT), ("a", BONUS))) == [("a", BONUS)]


@given(st.lists(st.tuples(st.text(max_size=4), st.lists(st.tuples(st.text(max_size=4), st.sampled_from([1, 2, 3]))))))
def test_all_text_comes_out_once_and_in_order(deltas: list[tuple[str, list[tuple[str, int]]]]) -> None:
    painter = OriginPainter()
    spans = [span for text, tokens in deltas for span, _ in painter.paint(delta(text, *tokens))]
    assert "".join(spans) == "".join(text for text, _ in deltas)
