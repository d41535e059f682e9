"""Makes a draft's engine take and give the target's token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import structlog

from specdec.config.draft import HeterogeneousVocab
from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.constraints.grammar.source import CONSTRAINTS_ID
from specdec.drafting.translation.runner import TranslatingRunner, drawn_ids
from specdec.drafting.translation.shared import SharedVocabulary, Side, method_for, share_vocabulary
from specdec.drafting.translation.tokens import TokenBytes, TokenizerRefused
from specdec.engine.errors import ModelLoadError
from specdec.engine.sampling.sampler import Sampler
from specdec.replica.worker.build import BuiltEngine, check_openings
from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class Translated:
    """A draft with a translation around its model."""

    built: BuiltEngine
    """The engine and sampler work with joint ids; the identity has the target's ids."""
    method: Literal["intersection", "text"]
    vocabulary: SharedVocabulary
    target: TokenBytes
    draft: TokenBytes


def translate(
    built: BuiltEngine,
    target: pb.ModelIdentity,
    target_tokenizer_json: str,
    wanted: HeterogeneousVocab,
    max_message_bytes: int,
) -> Translated | None:
    """Put a translation around a draft's model, in place. Returns None if it has the target's tokenizer.

    Args:
        built: the loaded draft.
        target: the target's identity.
        target_tokenizer_json: the target's `tokenizer.json`.
        wanted: the setting `heterogeneous_vocab`.
        max_message_bytes: the setting of that name.

    Raises:
        ModelLoadError: a tokenizer cannot be read, or too few tokens are shared for `wanted`.
        EngineError: a session that fills the context would exceed `max_message_bytes`.
    """
    own = built.info.identity
    if own.tokenizer_digest == target.tokenizer_digest:
        return None
    if built.model is None:
        raise ModelLoadError("model: a draft with another tokenizer than the target's must run in one process")
    try:
        ours = Side(TokenBytes(target_tokenizer_json), target.vocab_size, tuple(target.eos_token_ids))
        theirs = Side(TokenBytes(built.model.tokenizer_json), own.vocab_size, tuple(own.eos_token_ids))
    except TokenizerRefused as error:
        raise ModelLoadError(f"the draft's tokenizer differs from the target's; one is unusable: {error}") from error
    vocabulary = share_vocabulary(ours, theirs, built.model.num_logits)
    method = method_for(vocabulary, wanted)
    is_text = method == "text"
    num_drawn = vocabulary.num_joint if is_text else vocabulary.num_target
    identity = pb.ModelIdentity()
    identity.CopyFrom(own)
    identity.tokenizer_digest = target.tokenizer_digest
    identity.vocab_size = target.vocab_size
    identity.eos_token_ids[:] = target.eos_token_ids
    identity.draft_vocabulary.CopyFrom(
        pb.DraftVocabulary(
            method=method,
            num_shared=vocabulary.num_shared,
            num_target=vocabulary.num_named,
            tokenizer_digest=own.tokenizer_digest,
        )
    )
    grammars = None if is_text else _grammars(target, target_tokenizer_json)
    identity.constraints_id = "" if grammars is None else CONSTRAINTS_ID
    check_openings(identity, max_message_bytes)
    info = pb.GetReplicaInfoResponse()
    info.CopyFrom(built.info)
    info.identity.CopyFrom(identity)
    engine = built.engine
    engine.runner = TranslatingRunner(engine.runner, vocabulary, num_drawn, built.sampler.device)
    structlog.get_logger("specdec.draft").info(
        "other_tokenizer", method=method, num_shared=vocabulary.num_shared, num_target=vocabulary.num_named
    )
    # In text mode the text of a token decides the next one's position, so tokens are drawn one by one.
    drawing = None if is_text or built.drawing is None else built.drawing.by_ids(drawn_ids(vocabulary, num_drawn))
    adapted = replace(
        built,
        sampler=Sampler(num_drawn, built.sampler.device, native=built.sampler.native),
        info=info,
        drawing=drawing,
        grammars=grammars,
        mask_token_id=None if built.mask_token_id is None else vocabulary.joint_ids[built.mask_token_id],
    )
    return Translated(adapted, method, vocabulary, ours.tokens, theirs.tokens)


def _grammars(target: pb.ModelIdentity, tokenizer_json: str) -> GrammarCompiler | None:
    try:
        return GrammarCompiler(tokenizer_json, target.vocab_size, tuple(target.eos_token_ids))
    except ValueError:  # guesses are unmasked
        return None
