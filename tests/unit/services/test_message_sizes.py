"""Upper bounds of sizes are upper bounds, and what is cut stays in order, below the limit, and whole."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.replica.bridge.frame_codec import MAX_PAYLOAD_BYTES
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from specdec.wire.message_sizes import (
    ENTRY_OVERHEAD_BYTES,
    MAX_PROPOSAL_BYTES,
    MIN_MESSAGE_BYTES,
    MOST_MESSAGE_BYTES,
    frame_bytes,
    frame_slices,
    most_bytes,
    most_entry_bytes,
    opening_bytes,
    position_bytes,
    text_pieces,
    tokens_bytes,
    varint_bytes,
)
from specdec.wire.parsing.parts import read_frame
from specdec.wire.sampling_limits import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS

UINT32_MAX = 2**32 - 1


@given(st.lists(st.integers(0, 300)), st.integers(1, 400))
def test_frames_have_all_entries_in_order_and_are_bounded_unless_one_alone_is_larger(
    sizes: list[int], most: int
) -> None:
    frames = list(frame_slices(sizes, most))
    assert [index for frame in frames for index in range(frame.start, frame.stop)] == list(range(len(sizes)))
    for frame in frames:
        size = sum(sizes[frame]) + ENTRY_OVERHEAD_BYTES * (frame.stop - frame.start)
        assert frame.stop > frame.start
        assert size <= most or frame.stop - frame.start == 1


def test_a_frame_of_many_small_entries_is_cut_so_that_its_receiver_takes_it() -> None:
    frames = list(frame_slices([2] * 10_000, 2**22))
    assert [frame.stop - frame.start for frame in frames] == [4096, 4096, 1808]
    entry = target_pb2.TargetEntry(session_id="c/0123456789abcdef/0", epoch=1)
    entry.credit.CopyFrom(pb.Credit(position=1, acknowledged_position=1, prompt_logprobs_position=1))
    frame = target_pb2.VerifyRequest(entries=[entry] * 4096)
    assert read_frame(target_pb2.VerifyRequest, frame.SerializeToString()) == frame


@given(st.lists(st.integers(1, 300), min_size=1), st.integers(310, 2000))
def test_no_frame_could_have_taken_the_first_entry_of_the_next(sizes: list[int], most: int) -> None:
    frames = list(frame_slices(sizes, most))
    for frame, after in itertools.pairwise(frames):
        size = sum(sizes[frame]) + ENTRY_OVERHEAD_BYTES * (frame.stop - frame.start)
        assert size + sizes[after.start] + ENTRY_OVERHEAD_BYTES > most


@given(st.text(), st.integers(4, 50))
def test_pieces_of_a_text_are_whole_characters_and_bounded(text: str, most: int) -> None:
    pieces = list(text_pieces(text, most))
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= most for piece in pieces)


@given(st.integers(0, 2**64 - 1))
def test_a_number_takes_as_many_bytes_as_said(value: int) -> None:
    tag = 1
    assert pb.LoadReport(num_waiting_tokens=value).ByteSize() == tag + varint_bytes(value)


@settings(max_examples=50)
@given(st.integers(0, MAX_LOGPROBS), st.integers(1, 5), st.floats(allow_nan=False, width=32))
def test_positions_take_no_more_than_said(num_top: int, num_positions: int, logprob: float) -> None:
    top = [pb.TokenLogprob(token_id=UINT32_MAX, logprob=logprob)] * num_top
    positions = [pb.PositionLogprobs(logprob=logprob, top=top)] * num_positions
    part = pb.PromptLogprobsPart(start_position=UINT32_MAX, positions=positions)
    overhead = pb.PromptLogprobsPart(start_position=UINT32_MAX).ByteSize()
    assert part.ByteSize() - overhead <= num_positions * position_bytes(num_top)


@given(st.integers(1, 2**32), st.integers(1, 500))
def test_tokens_take_no_more_than_said(vocab_size: int, num_tokens: int) -> None:
    body = pb.OpenSession(token_ids=[min(vocab_size - 1, UINT32_MAX)] * num_tokens)
    framing = 1 + varint_bytes(num_tokens * 5)
    assert body.ByteSize() <= tokens_bytes(num_tokens, vocab_size) + framing


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 1024), st.integers(0, MAX_STOP_TOKEN_IDS))
def test_an_opening_takes_no_more_than_said(num_tokens: int, num_biases: int, num_stops: int) -> None:
    vocab_size = 2**20
    sampling = pb.TokenSampling(
        temperature=1.5, top_k=UINT32_MAX, top_p=0.5, min_p=0.5, repetition_penalty=1.5, presence_penalty=1.5,
        frequency_penalty=1.5, max_tokens=UINT32_MAX, min_tokens=UINT32_MAX, ignore_eos=True, seed=2**64 - 1,
        choice=UINT32_MAX, num_logprobs=MAX_LOGPROBS, stop_token_ids=[vocab_size - 1] * num_stops,
        logit_bias={vocab_size - 1 - index: 1.5 for index in range(num_biases)},
    )  # fmt: skip
    body = pb.OpenSession(
        token_ids=[vocab_size - 1] * num_tokens, num_prompt_tokens=num_tokens, sampling=sampling, speculate=True,
        verify_mode=pb.VERIFY_MODE_REJECTION, max_draft_tokens=64, deadline_ms=UINT32_MAX, lease_generation=2**64 - 1,
        priority=-1, cache_salt=b"s" * 512, fork_from="f" * 150, num_prompt_logprobs=MAX_LOGPROBS,
        credit_position=UINT32_MAX, traceparent="t" * 55, target="h" * 260, prompt_logprobs_credit=UINT32_MAX,
        prompt_logprobs_start=UINT32_MAX,
    )  # fmt: skip
    entry = target_pb2.TargetEntry(session_id="i" * 150, epoch=2**64 - 1, open=body)
    assert entry.ByteSize() <= opening_bytes(num_tokens, vocab_size, sampling.ByteSize())
    assert entry.ByteSize() <= opening_bytes(num_tokens, vocab_size)


def test_what_has_no_limit_of_its_own_fits_into_the_smallest_message() -> None:
    distribution = pb.SparseDistribution(token_ids=[UINT32_MAX] * 64, probs=[0.5] * 64)
    proposal = pb.Proposal(
        start_position=UINT32_MAX, token_ids=[UINT32_MAX] * 64, parents=[63] * 64, scores=bytes([255] * 64),
        distributions=[distribution] * 64, draft_us=UINT32_MAX, path_length=64,
    )  # fmt: skip
    assert proposal.ByteSize() <= MAX_PROPOSAL_BYTES
    entry = target_pb2.TargetEntry(session_id="i" * 150, epoch=2**64 - 1, proposal=bytes(MAX_PROPOSAL_BYTES))
    assert entry.ByteSize() + ENTRY_OVERHEAD_BYTES <= frame_bytes(MIN_MESSAGE_BYTES)
    assert 2 * position_bytes(MAX_LOGPROBS) < most_entry_bytes(MIN_MESSAGE_BYTES) // 2


def test_a_peer_that_tells_nothing_takes_what_we_take_and_none_takes_less_than_the_least() -> None:
    assert most_bytes(0, 2**20) == 2**20
    assert most_bytes(2**24, 2**20) == 2**24
    assert most_bytes(1, 2**20) == MIN_MESSAGE_BYTES


def test_no_peer_is_believed_to_take_more_than_a_frame_between_processes_holds() -> None:
    assert most_bytes(UINT32_MAX, MIN_MESSAGE_BYTES) == MOST_MESSAGE_BYTES < MAX_PAYLOAD_BYTES
    assert most_bytes(1, MIN_MESSAGE_BYTES) == MIN_MESSAGE_BYTES
    assert most_bytes(0, 12345) == 12345
