"""Grammars over the tokenizer of the shipped pair."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import Message
from tokenizers import Tokenizer

from specdec.constraints.grammar.compiler import Compilation, GrammarCompiler
from specdec.constraints.grammar.follower import GrammarFollower
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import MODELS

TOKENIZER: Tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
EOS = 1
VOCAB_SIZE = 4096
_MOST_WAIT_S = 60.0


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def json_schema(schema: Any) -> pb.Constraint:
    return pb.Constraint(json_schema=json.dumps(schema))


def compiled() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, (EOS,))


def wait_for(compilation: Compilation) -> Compilation:
    assert compilation.done.wait(_MOST_WAIT_S)
    return compilation


def follower(compiler: GrammarCompiler, constraint: pb.Constraint, *, ignore_eos: bool = False) -> GrammarFollower:
    compilation = wait_for(compiler.compile(constraint, b""))
    assert isinstance(constraint, Message)
    return GrammarFollower(
        compilation.result(),
        compilation.source.field,
        vocab_size=compiler.vocab_size,
        eos_token_ids=compiler.eos_token_ids,
        after_token_id=constraint.after_token_id if constraint.HasField("after_token_id") else None,
        opening_token_id=constraint.opening_token_id if constraint.HasField("opening_token_id") else None,
        holds_back_eos=ignore_eos,
    )
