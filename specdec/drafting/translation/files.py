"""What the files of two models say of the tokens that both have, before either is loaded."""

from __future__ import annotations

import json
from typing import Any

from specdec.drafting.translation.shared import SharedVocabulary, Side, share_vocabulary
from specdec.drafting.translation.tokens import TokenBytes, TokenizerRefused
from specdec.engine.checkpoints.files import find_model_files, read_eos_token_ids, read_tokenizer
from specdec.engine.errors import ModelLoadError


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
