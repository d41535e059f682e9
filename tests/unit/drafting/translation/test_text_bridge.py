"""Text between two tokenizers: whatever is committed and drafted, both sides stand for the same bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafting.text.bridge import LOOK_BACK, Piece, TextBridge
from specdec.drafting.translation.shared import SharedVocabulary, Side, share_vocabulary
from specdec.drafting.translation.tokens import TokenBytes
from tests.support.engine.local_pair import MODELS
from tests.support.engine.other_tokenizers import draft_of_another_family, draft_of_pieces, draft_with_fewer_tokens
from tests.unit.lossless.sessions import examples

TEXTS = [(MODELS / name).read_text() for name in ("evaluate.py", "README.md")]
TARGET = TokenBytes((MODELS / "target" / "tokenizer.json").read_text())
BOS, EOS, PAD = 0, 1, 2


class Between:
    """A bridge from the shipped target to a draft."""

    def __init__(self, folder: Path) -> None:
        self.draft = TokenBytes((folder / "tokenizer.json").read_text())
        eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
        draft = Side(self.draft, max(self.draft.ids) + 1, (eos,))
        self.vocabulary: SharedVocabulary = share_vocabulary(Side(TARGET, 4096, (EOS,)), draft, draft.num_ids)
        self.bridge = TextBridge(TARGET, self.draft, self.vocabulary)

    def pieces(self, text: bytes) -> list[Piece]:
        return [(self.vocabulary.joint_ids[token_id], span) for token_id, span in self.draft.encode(text)]

    def own(self, pieces: list[Piece]) -> list[int]:
        return [self.vocabulary.inputs[joint] for joint, _ in pieces]


KINDS = ("fewer", "family", "pieces")


@pytest.fixture(scope="module", params=KINDS)
def between(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Between:
    folder = tmp_path_factory.mktemp(request.param) / "draft"
    made = {
        "fewer": lambda: draft_with_fewer_tokens(folder, 700),
        "family": lambda: draft_of_another_family(folder, TEXTS),
        "pieces": lambda: draft_of_pieces(folder, TEXTS),
    }
    return Between(made[request.param]())


def text_of(token_ids: list[int]) -> bytes:
    return b"".join(map(TARGET.bytes_of, token_ids))


def joined(pieces: list[Piece]) -> bytes:
    return b"".join(span for _, span in pieces)


def ids_of(text: str) -> list[int]:
    return [token_id for token_id, _ in TARGET.encode(text.encode())]


def test_a_text_opens_with_what_the_draft_puts_before_it(between: Between) -> None:
    for token_ids in ([BOS, *ids_of("def read(path):\n")], ids_of("def read(path):\n")):
        pieces = between.bridge.opening(token_ids)
        assert between.own(pieces)[: len(between.draft.before)] == list(between.draft.before)
        assert joined(pieces).removeprefix(b"<|bos|>") == b"def read(path):\n"


def test_a_text_is_written_as_the_draft_would_write_it(between: Between) -> None:
    text = "class Stack:\n    def push(self, item):\n"
    pieces = between.bridge.opening(ids_of(text))
    assert between.own(pieces)[len(between.draft.before) :] == [i for i, _ in between.draft.encode(text.encode())]


def test_what_was_committed_in_parts_is_what_it_is_in_one(between: Between) -> None:
    """Merges over the boundary of a commit are made, as far as it is looked back."""
    token_ids = ids_of("def fibonacci(number):\n    previous, current = 0, 1\n    while current < number:\n")
    pieces = between.bridge.opening(token_ids[:5])
    for token_id in token_ids[5:]:
        kept, more = between.bridge.follow(pieces, [], [token_id], floor=1)
        pieces = [*pieces[:kept], *more]
    assert pieces == between.bridge.opening(token_ids)


def test_drafted_text_that_is_committed_stays_as_it_was_drafted(between: Between) -> None:
    before = ids_of("import os\n\nfor name in")
    committed = between.bridge.opening(before)
    new = ids_of(" os.listdir")
    drafted = [*between.pieces(text_of(new)), *between.pieces(b"('.'):")]
    kept, more = between.bridge.follow(committed, drafted, new, floor=1)
    assert more == []
    assert joined(drafted[: kept - len(committed)]) == text_of(new)


def test_characters_that_come_byte_by_byte_become_whole(between: Between) -> None:
    committed = between.bridge.opening(ids_of("x = '"))
    for byte in "漢é".encode():
        [(token_id, span)] = TARGET.encode(bytes([byte]))
        assert span == bytes([byte])
        kept, more = between.bridge.follow(committed, [], [token_id], floor=1)
        committed = [*committed[:kept], *more]
    assert joined(committed).endswith("x = '漢é".encode())
    text = "漢é".encode()
    assert between.own(committed)[-len(between.draft.encode(text)) :] == [i for i, _ in between.draft.encode(text)]


def test_drafted_text_is_told_as_the_target_writes_it(between: Between) -> None:
    committed = ids_of("def read_all(path):\n    with open(path) as")
    drafted = between.pieces(b" file:\n        return file.read()\n")
    written = between.bridge.written(committed, drafted)
    whole = ids_of("def read_all(path):\n    with open(path) as file:\n        return file.read()\n")
    assert list(written.token_ids[: written.num_settled]) == whole[len(committed) :][: written.num_settled]
    assert written.num_settled >= 8


def test_a_boundary_that_would_merge_is_left_where_it_is(between: Between) -> None:
    """The target has committed half a word; what follows is written behind it."""
    committed = [*ids_of("for item in"), *ids_of(" it")]
    written = between.bridge.written(committed, between.pieces(b"ems:\n"))
    assert text_of(list(written.token_ids)) == b"ems:\n"


def test_the_end_of_a_text_is_told_as_the_targets_end(between: Between) -> None:
    end = between.bridge.piece(EOS)
    written = between.bridge.written(ids_of("x = 1"), [*between.pieces(b"\n"), end])
    assert written.token_ids == (*ids_of("\n"), EOS)
    assert written.num_settled == len(written.token_ids)
    assert between.bridge.is_special(EOS)


def test_special_tokens_are_not_written_as_text_where_both_have_them(between: Between) -> None:
    pieces = between.bridge.opening([BOS, *ids_of("a"), EOS, *ids_of("b")])
    assert pieces.count((EOS, b"<|eos|>")) == 1
    kept, more = between.bridge.follow(pieces, [], ids_of("c"), floor=1)
    assert (EOS, b"<|eos|>") in pieces[:kept]
    assert joined([*pieces[:kept], *more]).endswith(b"<|eos|>bc")


token_lists = st.lists(st.one_of(st.integers(0, 4095), st.integers(0, 300)), min_size=1, max_size=14)


@given(first=token_lists, commits=st.lists(token_lists, max_size=5), seed=st.integers(0, 2**32))
@examples
def test_whatever_is_drafted_and_committed_the_pieces_are_the_text(
    between: Between, first: list[int], commits: list[list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    token_ids, pieces, floor = list(first), between.bridge.opening(first), 1
    assert joined(pieces) == text_of(token_ids)
    for new in commits:
        size = between.vocabulary.num_joint
        drawn = [joint for joint in (rng.randrange(size) for _ in range(6)) if between.vocabulary.columns[joint] >= 0]
        drafted = between.pieces(text_of(new)) if rng.random() < 0.4 else []
        drafted += [between.bridge.piece(joint) for joint in drawn]
        check_written(between, token_ids, drafted)
        kept, more = between.bridge.follow(pieces, drafted, new, floor)
        assert kept >= floor
        pieces = [*[*pieces, *drafted][:kept], *more]
        token_ids += new
        assert joined(pieces) == text_of(token_ids)
        floor = max(floor, len(pieces) - LOOK_BACK)


def check_written(between: Between, committed: list[int], drafted: list[Piece]) -> None:
    written = between.bridge.written(committed, drafted)
    assert 0 <= written.num_settled <= len(written.token_ids) == len(written.ends)
    assert all(0 <= token_id < 4096 for token_id in written.token_ids)
    specials = [index for index, (joint, _) in enumerate(drafted) if between.bridge.is_special(joint)]
    if not specials:
        assert joined(drafted).startswith(text_of(list(written.token_ids)))
