"""Which tokens two tokenizers share, and ids for those of both: the joint ids.

Joint ids below `num_target` are the target's own; each id from there on is a token that only the draft has. So what is
drawn, counted, biased or sent by joint id is so by the target's id wherever the target has the token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specdec.config.draft import HeterogeneousVocab
from specdec.drafting.translation.tokens import TokenBytes, TokenizerRefused
from specdec.engine.checkpoints.files import find_model_files, read_eos_token_ids, read_tokenizer
from specdec.engine.errors import ModelLoadError

LEAST_SHARE = 0.4
"""Of the target's tokens, from which on drafting token by token was found better than drafting text."""
_LEAST_SHARED = 100
"""Fewer tokens that both have are an accident."""


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The tokens of a draft by joint ids. Ids are checked: none occurs twice, none is out of range."""

    num_target: int
    """Ids that the target has."""
    num_shared: int
    """Of those that stand for something, how many the draft has, too."""
    num_named: int
    """How many stand for something."""
    inputs: tuple[int, ...]
    """[joint ids]: the draft's id for each; where it has none, one that says as much of it as one token can."""
    columns: tuple[int, ...]
    """[joint ids]: the draft's id whose logit it has; -1: none."""
    joint_ids: tuple[int, ...]
    """[rows of the draft's embedding]: the joint id of each."""

    @property
    def share(self) -> float:
        """Of the target's tokens, how many the draft has; 0 to 1."""
        return self.num_shared / self.num_named if self.num_named else 0.0

    @property
    def num_joint(self) -> int:
        """How many joint ids there are."""
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models."""

    tokens: TokenBytes
    num_ids: int
    """Ids at and past this are never drawn."""
    eos_token_ids: Sequence[int]
    """Those that end its sequences."""


def share_vocabulary(target: Side, draft: Side, num_draft_rows: int) -> SharedVocabulary:
    """Find what both have: the same bytes, the same special token, or the same role.

    Of several tokens with the same bytes the one with the lowest id is shared.

    Args:
        target: whose ids the joint ones begin with.
        draft: likewise.
        num_draft_rows: of the draft's embedding, of which the last may be padding or masks.

    Cost: a call per token, 0.2 s for 100,000.
    """
    named = [token_id for token_id in target.tokens.ids if token_id < target.num_ids]
    by_content = _by_content(draft)
    draft_of: dict[int, int] = {}
    taken: set[int] = set()

    def pair(target_id: int, draft_id: int | None) -> None:
        if draft_id is not None and draft_id not in taken and target_id not in draft_of:
            draft_of[target_id] = draft_id
            taken.add(draft_id)

    for token_id in named:
        pair(token_id, by_content.get(_content(target.tokens, token_id)))
    for ours, theirs in (
        (target.eos_token_ids, draft.eos_token_ids),
        (target.tokens.before, draft.tokens.before),
    ):
        if ours and theirs and not any(token_id in draft_of for token_id in ours):
            pair(ours[0], theirs[0])
    only_draft = [token_id for token_id in range(num_draft_rows) if token_id not in taken]
    joint_of = {draft_id: target_id for target_id, draft_id in draft_of.items()}
    joint_of |= {draft_id: target.num_ids + number for number, draft_id in enumerate(only_draft)}
    known = set(named)
    fallback = draft.eos_token_ids[0] if draft.eos_token_ids else 0
    inputs = [
        draft_of[token_id]
        if token_id in draft_of
        else _nearest(target.tokens, draft.tokens, token_id, fallback)
        if token_id in known
        else fallback
        for token_id in range(target.num_ids)
    ]
    drawn = set(draft.tokens.ids)
    columns = [draft_of.get(token_id, -1) for token_id in range(target.num_ids)]
    columns += [token_id if token_id in drawn and token_id < draft.num_ids else -1 for token_id in only_draft]
    return SharedVocabulary(
        num_target=target.num_ids,
        num_shared=len(draft_of),
        num_named=len(named),
        inputs=(*inputs, *only_draft),
        columns=tuple(columns),
        joint_ids=tuple(joint_of[token_id] for token_id in range(num_draft_rows)),
    )


def method_for(vocabulary: SharedVocabulary, wanted: HeterogeneousVocab) -> Literal["intersection", "text"]:
    """Which way a draft goes, as its setting `heterogeneous_vocab` says or what both have makes the better one.

    Raises ModelLoadError: too little is shared for the way that is wanted.
    """
    if wanted == "text":
        return "text"
    if wanted == "intersection":
        if vocabulary.num_shared < _LEAST_SHARED:
            raise ModelLoadError(
                f"heterogeneous_vocab: the draft has {vocabulary.num_shared} of the target's {vocabulary.num_named} "
                "tokens, too few for intersection; use text"
            )
        return "intersection"
    return "intersection" if vocabulary.share >= LEAST_SHARE else "text"


def _by_content(side: Side) -> dict[tuple[bool, bytes], int]:
    found: dict[tuple[bool, bytes], int] = {}
    for token_id in side.tokens.ids:
        if token_id < side.num_ids:
            found.setdefault(_content(side.tokens, token_id), token_id)
    return found


def _content(tokens: TokenBytes, token_id: int) -> tuple[bool, bytes]:
    return token_id in tokens.special, tokens.bytes_of(token_id)


def _nearest(target: TokenBytes, draft: TokenBytes, token_id: int, fallback: int) -> int:
    """The last of the draft's tokens for a token that it does not have: what comes next depends most on the end."""
    if token_id in target.special:
        return fallback
    pieces = draft.encode(target.bytes_of(token_id))
    return pieces[-1][0] if pieces else fallback


def shared_of_files(target_model: str, draft_model: str) -> SharedVocabulary:
    """What a draft has of a target's tokens. Raises ModelLoadError."""
    target, _ = side_of_files(target_model)
    return share_vocabulary(target, *side_of_files(draft_model))


def side_of_files(model: str, revision: str | None = None) -> tuple[Side, int]:
    """A model's tokens, and how many rows its embedding has, by its config. Raises ModelLoadError."""
    folder, _ = find_model_files(model, revision)
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text_config = config.get("text_config") or config
        tokenizer = read_tokenizer(folder)
        tokens = TokenBytes(tokenizer.tokenizer_json)
        eos = read_eos_token_ids(folder, text_config.get("eos_token_id", config.get("eos_token_id")))
        num_ids = tokenizer.vocab_size or 0
        num_rows = int(text_config.get("vocab_size", num_ids))
    except (OSError, ValueError, TypeError, AttributeError, TokenizerRefused) as error:
        raise ModelLoadError(f"model: {model}: what its tokens are cannot be read: {error}") from error
    return Side(tokens, min(num_rows, num_ids), eos), num_rows
