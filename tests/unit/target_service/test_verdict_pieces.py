"""A verdict that no message holds is told in several, which say the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.target_service.verdicts import end_position, pieces_of
from specdec.v1 import common_pb2 as pb


def position(num_top: int) -> pb.PositionLogprobs:
    top = [pb.TokenLogprob(token_id=2**32 - 1, logprob=-1.5)] * num_top
    return pb.PositionLogprobs(logprob=-0.5, top=top)


def a_verdict(tops: list[int]) -> pb.Verdict:
    num = len(tops)
    return pb.Verdict(
        start_position=1000, token_ids=range(num), origins=[pb.ORIGIN_DRAFT] * num, logprobs=map(position, tops),
        finish_reason=pb.FINISH_REASON_STOP, stop_token_id=7, verified_by_depth=[1] * 64, num_accepted=num - 1,
        hit=True, step_us=100, num_wasted=3,
    )  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.integers(0, 256), min_size=1, max_size=65), st.integers(8_000, 250_000))
def test_pieces_follow_each_other_are_bounded_and_say_all_that_the_whole_says(tops: list[int], most: int) -> None:
    whole = a_verdict(tops)
    before = whole.SerializeToString()
    pieces = pieces_of(whole, most)
    assert all(piece.ByteSize() <= most for piece in pieces)
    assert [piece.is_partial for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    position = whole.start_position
    for piece in pieces:
        assert piece.start_position == position
        assert len(piece.token_ids) == len(piece.origins) == len(piece.logprobs) > 0
        position = end_position(piece)
    joined = pb.Verdict()
    joined.CopyFrom(pieces[-1])
    joined.start_position = whole.start_position
    for name in ("token_ids", "origins", "logprobs"):
        del getattr(joined, name)[:]
        for piece in pieces:
            getattr(joined, name).extend(getattr(piece, name))
    assert joined.SerializeToString() == before == whole.SerializeToString()


def test_a_verdict_that_fits_is_left_alone() -> None:
    whole = a_verdict([20] * 5)
    assert pieces_of(whole, 10_000)[0] is whole


@settings(max_examples=60)
@given(st.lists(st.sampled_from([pb.ORIGIN_DRAFT, pb.ORIGIN_FORCED]), min_size=1, max_size=64))
def test_each_piece_names_the_drafters_of_its_own_tokens_whatever_is_forced_among_them(
    accepted: list[pb.Origin.ValueType],
) -> None:
    whole = a_verdict([256] * (len(accepted) + 1))
    whole.origins[:] = [*accepted, pb.ORIGIN_BONUS]
    names = iter(range(len(accepted)))
    told = [f"drafter_{next(names)}" if origin == pb.ORIGIN_DRAFT else "" for origin in accepted]
    whole.accepted_by.extend(name for name in told if name)
    found: list[str] = []
    for piece in pieces_of(whole, 10_000):
        own = iter(piece.accepted_by)
        found += [next(own) if origin == pb.ORIGIN_DRAFT else "" for origin in piece.origins]
        assert next(own, None) is None
    assert found == [*told, ""]
