"""Which tokens two tokenizers share, and what passes between their ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import DraftSettings
from specdec.drafting.translation.build import Translated, translate
from specdec.drafting.translation.runner import TranslatingRunner
from specdec.drafting.translation.shared import SharedVocabulary, Side, share_vocabulary
from specdec.drafting.translation.tokens import TokenBytes, TokenizerRefused, split_half_character
from specdec.engine.batch import Batch
from specdec.engine.errors import ModelLoadError
from specdec.replica.worker.build import build_engine
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import MODELS
from tests.support.engine.other_tokenizers import draft_of_another_family, draft_of_pieces, permuted_draft

TEXTS = [(MODELS / name).read_text() for name in ("evaluate.py", "README.md")]
TARGET_JSON = (MODELS / "target" / "tokenizer.json").read_text()
TARGET = Side(TokenBytes(TARGET_JSON), 4096, (1,))


def shared_with(folder: Path, num_rows: int = 0) -> tuple[Side, SharedVocabulary]:
    tokens = TokenBytes((folder / "tokenizer.json").read_text())
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    draft = Side(tokens, max(tokens.ids) + 1, (eos,))
    return draft, share_vocabulary(TARGET, draft, num_rows or draft.num_ids)


def test_tokens_joined_are_the_bytes_of_the_text() -> None:
    text = "def café(x):\n\t'漢字 😀'\n".encode()
    for tokens in (TARGET.tokens,):
        pieces = tokens.encode(text)
        assert b"".join(span for _, span in pieces) == text
        assert [span for _, span in pieces] == [tokens.bytes_of(token_id) for token_id, _ in pieces]


def test_bytes_that_are_no_text_become_tokens_too(tmp_path: Path) -> None:
    draft, _ = shared_with(draft_of_pieces(tmp_path / "draft", TEXTS))
    for tokens in (TARGET.tokens, draft.tokens):
        for data in (b"\xe6\xbc", b"a\xffb", b" def \xf0\x9f"):
            assert b"".join(span for _, span in tokens.encode(data)) == data


@pytest.mark.parametrize(
    ("data", "half"),
    [
        (b"", b""),
        (b"ab", b""),
        ("é".encode(), b""),
        (b"a\xc3", b"\xc3"),
        (b"\xe6\xbc", b"\xe6\xbc"),
        ("漢".encode(), b""),
        (b"x\xf0\x9f\x98", b"\xf0\x9f\x98"),
        ("😀".encode(), b""),
        (b"\x80\x80", b""),
    ],
)
def test_half_characters_are_told_from_whole_ones(data: bytes, half: bytes) -> None:
    assert split_half_character(data) == (data[: len(data) - len(half)], half)


def test_all_tokens_of_a_permuted_vocabulary_are_shared(tmp_path: Path) -> None:
    draft, shared = shared_with(permuted_draft(tmp_path / "draft"))
    assert (shared.num_shared, shared.num_joint, shared.share) == (4096, 4096, 1.0)
    assert shared.inputs == shared.columns
    for token_id in (0, 1, 2, 50, 4000):
        assert draft.tokens.bytes_of(shared.inputs[token_id]) == TARGET.tokens.bytes_of(token_id)
        assert shared.joint_ids[shared.inputs[token_id]] == token_id


def test_ends_and_beginnings_are_shared_by_their_role(tmp_path: Path) -> None:
    draft, shared = shared_with(draft_of_another_family(tmp_path / "draft", TEXTS))
    assert draft.tokens.special[shared.inputs[0]] == "<s>"
    assert draft.tokens.special[shared.inputs[1]] == "</s>"
    assert shared.columns[1] == 2


def test_each_joint_id_stands_for_one_token_and_each_token_has_one(tmp_path: Path) -> None:
    draft, shared = shared_with(draft_of_pieces(tmp_path / "draft", TEXTS), num_rows=720)
    assert len(set(shared.joint_ids)) == len(shared.joint_ids) == 720
    assert all(shared.inputs[joint] == token_id for token_id, joint in enumerate(shared.joint_ids))
    named = [column for column in shared.columns if column >= 0]
    assert len(set(named)) == len(named)
    assert all(column < draft.num_ids for column in named), "padding is never drawn"
    assert shared.num_joint == 4096 + 720 - shared.num_shared


def test_what_the_draft_lacks_goes_in_as_the_last_of_its_tokens_for_it(tmp_path: Path) -> None:
    draft, shared = shared_with(draft_of_another_family(tmp_path / "draft", TEXTS, 300))
    lacking = [token_id for token_id in range(300, 4096) if shared.columns[token_id] < 0]
    assert lacking
    for token_id in lacking[:50]:
        data = TARGET.tokens.bytes_of(token_id)
        assert data.endswith(draft.tokens.bytes_of(shared.inputs[token_id]))


class EchoRunner:
    """Its logits are ten times the row's id, plus the column."""

    device = torch.device("cpu")

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.input_ids[:, None] * 10.0 + torch.arange(4.0)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...

    def copy_slots(self, src: list[int], dst: list[int]) -> None: ...


def test_the_runner_translates_ids_in_and_columns_out() -> None:
    vocabulary = SharedVocabulary(3, 2, 3, inputs=(2, 0, 3, 1, 3), columns=(2, 0, -1, 1, 3), joint_ids=(1, 3, 0, 4))
    ids = torch.tensor([0, 1, 2, 3])
    batch = Batch(input_ids=ids, **{name: torch.zeros(0) for name in _BATCH if name != "num_seqs"}, num_seqs=1)
    logits = TranslatingRunner(EchoRunner(), vocabulary, 4, torch.device("cpu")).forward(batch)
    assert logits.tolist() == [[10.0 * own + column for column in (2, 0, -torch.inf, 1)] for own in (2, 0, 3, 1)]


_BATCH = (
    "position_ids", "slot_mapping", "row_seq", "context_lens", "path_offsets", "path_slots", "block_tables",
    "logits_indices", "num_seqs",
)  # fmt: skip


def translated(folder: Path, wanted: Any, tokenizer_json: str = TARGET_JSON) -> Translated | None:
    built = build_engine(DraftSettings(model=str(folder), num_threads=1, num_blocks=8))
    target = pb.ModelIdentity(name="t", vocab_size=4096, eos_token_ids=[1], tokenizer_digest="the target's")
    return translate(built, target, tokenizer_json, wanted, 1 << 24)


def test_the_identity_is_that_of_who_speaks_the_targets_ids(tmp_path: Path) -> None:
    found = translated(draft_of_another_family(tmp_path / "draft", TEXTS), "intersection")
    assert found is not None
    identity = found.built.info.identity
    assert (identity.tokenizer_digest, identity.vocab_size) == ("the target's", 4096)
    assert list(identity.eos_token_ids) == [1]
    told = identity.draft_vocabulary
    assert (told.method, told.num_shared, told.num_target) == ("intersection", found.vocabulary.num_shared, 4096)
    assert told.tokenizer_digest not in ("", "the target's")


def test_where_little_is_shared_text_is_drafted_unless_told_otherwise(tmp_path: Path) -> None:
    found = translated(draft_of_another_family(tmp_path / "small", TEXTS, 300), "auto")
    assert found is not None
    assert found.method == "text"
    assert found.built.sampler.vocab_size == found.vocabulary.num_joint
    found = translated(permuted_draft(tmp_path / "permuted"), "auto")
    assert found is not None
    assert found.method == "intersection"


def test_a_tokenizer_that_is_none_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TokenizerRefused, match=r"no tokenizer\.json"):
        TokenBytes("/etc/passwd")
    with pytest.raises(TokenizerRefused, match="cannot be read"):
        TokenBytes("{}")
    with pytest.raises(ModelLoadError, match="tokenizer differs from the target's; one is unusable"):
        translated(permuted_draft(tmp_path / "draft"), "auto", tokenizer_json="{}")


def test_too_few_shared_tokens_are_no_intersection(tmp_path: Path) -> None:
    content = json.loads(TARGET_JSON)
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {f"\u00ff{token}\u00ff": token_id for token, token_id in vocabulary.items()}
    content["model"]["merges"] = []
    with pytest.raises(ModelLoadError, match="too few for intersection; use text"):
        translated(permuted_draft(tmp_path / "draft"), "intersection", tokenizer_json=json.dumps(content))
