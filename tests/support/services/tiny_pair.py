"""A tiny random target with a byte-level tokenizer, and a draft that is the same model with noise added.

They start in a second, and proposals are both accepted and rejected at every depth.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.services.model_pair import ModelPair

CHAT_TEMPLATE = (
    "{% if voice %}({{ voice }}){% endif %}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}assistant:"
)
SPECIAL_TOKENS = ["<bos>", "<eos>", "<pad>"]


def make_tiny_pair(folder: Path, *, noise: float = 0.006, max_model_len: int = 4096, seed: int = 0) -> ModelPair:
    """Write a pair to `folder`/target and `folder`/draft.

    Args:
        max_model_len: Positions of the models; the default leaves room for long streams.
        noise: Standard deviation of the noise on the draft's weights; with 0 it equals the target.
    """
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    pair = ModelPair(folder / "target", folder / "draft")
    model.save_pretrained(pair.target)
    tokenizer.save_pretrained(pair.target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    model.save_pretrained(pair.draft)
    tokenizer.save_pretrained(pair.draft)
    return pair


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, chat_template=CHAT_TEMPLATE
    )
