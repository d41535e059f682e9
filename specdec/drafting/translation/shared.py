"""The tokens that two tokenizers share, and joint ids for the tokens of both.

Joint ids below `num_target` are the target's own; the others are tokens that only the draft has. So sampling, counts,
biases and messages use the target's id of every token that the target has.
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
"""Share of the target's tokens from which drafting token by token was measured to beat drafting text."""
_LEAST_SHARED = 100
"""Shared tokens below which `intersection` is refused: fewer are an accident."""


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """A draft's tokens by joint ids. All ids are unique and in range."""

    num_target: int
    """Number of the target's ids."""
    num_shared: int
    """Number of the target's tokens that the draft also has."""
    num_named: int
    """Number of the target's ids that are tokens."""
    inputs: tuple[int, ...]
    """[joint ids]: the draft's id for each, or for the end of its text if the draft lacks the token."""
    columns: tuple[int, ...]
    """[joint ids]: the draft's id that gives its logit; -1: none."""
    joint_ids: tuple[int, ...]
    """[rows of the draft's embedding]: the joint id of each."""

    @property
    def share(self) -> float:
        """Share of the target's tokens that the draft has, 0 to 1."""
        return self.num_shared / self.num_named if self.num_named else 0.0

    @property
    def num_joint(self) -> int:
        """Number of joint ids."""
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models."""

    tokens: TokenBytes
    num_ids: int
    """Sampled ids are below it."""
    eos_token_ids: Sequence[int]
    """Tokens that end its sequences."""


def share_vocabulary(target: Side, draft: Side, num_draft_rows: int) -> SharedVocabulary:
    """Find the shared tokens: same bytes, same special token, or same role.

    Of several tokens with the same bytes the one with the lowest id is shared.

    Args:
        target: its ids come first in the joint ids.
        draft: its other tokens follow.
        num_draft_rows: rows of the draft's embedding; the last may be padding or masks.

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
    """The method by the setting `heterogeneous_vocab`, or else by the share of common tokens.

    Raises ModelLoadError: too few tokens are shared for the wanted method.
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
    """The last of the draft's tokens for a target token that it lacks, as the end predicts the next token best."""
    if token_id in target.special:
        return fallback
    pieces = draft.encode(target.bytes_of(token_id))
    return pieces[-1][0] if pieces else fallback


def shared_of_files(target_model: str, draft_model: str) -> SharedVocabulary:
    """The shared vocabulary of two models' files. Raises ModelLoadError."""
    target, _ = side_of_files(target_model)
    return share_vocabulary(target, *side_of_files(draft_model))


def side_of_files(model: str, revision: str | None = None) -> tuple[Side, int]:
    """A model's tokens, and its embedding's rows by its config. Raises ModelLoadError."""
    folder, _ = find_model_files(model, revision)
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text_config = config.get("text_config") or config
        tokenizer = read_tokenizer(folder)
        tokens = TokenBytes(tokenizer.tokenizer_json)
        num_ids = tokenizer.vocab_size or 0
        num_rows = int(text_config.get("vocab_size", num_ids))
        vocab_size, named_eos = min(num_rows, num_ids), text_config.get("eos_token_id", config.get("eos_token_id"))
        eos = read_eos_token_ids(folder, named_eos, tokenizer, vocab_size)
    except (OSError, ValueError, TypeError, AttributeError, TokenizerRefused) as error:
        raise ModelLoadError(f"model: {model}: its tokenizer or config cannot be read: {error}") from error
    return Side(tokens, vocab_size, eos), num_rows
