"""Give the fresh draft an induction head, rather than wait for it to grow one.

An induction head finds an earlier occurrence of the current token and predicts what followed it
(Olsson et al., "In-context learning and induction heads", arXiv:2209.11895). Code repeats itself,
so most of what a context teaches is learned through it. It takes two layers: a head of the first
writes each token's predecessor beside it, a head of the second looks for the current token among
those predecessors. The ten-layer target found it within three million tokens; a draft of two layers
had not found it after five million. So it is written into the initial weights. Training is free to
change every one of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CODE = 28  # numbers that stand for a token when tokens are compared
CONSTANT = 0  # residual channel with one value for all tokens
CODE_START = 1  # first of the residual channels that hold the predecessor's code
CONTENT_START = CODE_START + CODE  # channels of the embedding proper
SHARP_PAIRS = 6  # rotary pairs of highest frequency: they tell neighbours apart
FLAT_FROM = 18  # rotary pairs from here on hardly turn within a context
CONSTANT_VALUE = 0.08
PREVIOUS_GAIN = 3.0
MATCH_GAIN = 3.2
COPY_GAIN = 0.2


def _orthonormal_rows(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    matrix = torch.randn(columns, rows, generator=generator)
    return torch.linalg.qr(matrix).Q.t()


@torch.no_grad()
def plant_induction_head(model: LlamaForCausalLM, seed: int = 0) -> None:
    """Write the two heads into query head 0 and key-value head 0 of layers 0 and 1, in place.

    The model must be fresh, with tied embeddings and zero output projections.
    """
    generator = torch.Generator().manual_seed(seed)
    width, head = model.config.hidden_size, model.config.head_dim
    pairs = head // 2
    embedding = model.model.embed_tokens.weight
    embedding[:, CONSTANT] = CONSTANT_VALUE
    embedding[:, CODE_START:CONTENT_START] = 0.0
    code = torch.zeros(CODE, width)
    code[:, CONTENT_START:] = _orthonormal_rows(CODE, width - CONTENT_START, generator)
    copy = torch.zeros(head, width)
    copy[:, CONTENT_START:] = _orthonormal_rows(head, width - CONTENT_START, generator)
    std = embedding[:, CONTENT_START:].std()

    # Layer 0: constant keys and queries, the query turned by one position, attend to the predecessor.
    first = model.model.layers[0].self_attn
    sharp = torch.arange(SHARP_PAIRS)
    angle = model.config.rope_parameters["rope_theta"] ** (-sharp.float() / pairs)
    for projection in (first.q_proj, first.k_proj, first.v_proj):
        projection.weight[:head] = 0.0
    first.k_proj.weight[sharp, CONSTANT] = math.sqrt(PREVIOUS_GAIN)
    first.q_proj.weight[sharp, CONSTANT] = math.sqrt(PREVIOUS_GAIN) * angle.cos()
    first.q_proj.weight[sharp + pairs, CONSTANT] = -math.sqrt(PREVIOUS_GAIN) * angle.sin()
    first.v_proj.weight[:CODE] = code
    first.o_proj.weight[CODE_START:CONTENT_START, :CODE] = std * torch.eye(CODE)

    # Layer 1: the current token's code asks, the predecessors' codes answer, the token found is copied.
    second = model.model.layers[1].self_attn
    flat = torch.arange(FLAT_FROM, pairs)
    channels = torch.cat([flat, flat + pairs])
    for projection in (second.q_proj, second.k_proj, second.v_proj):
        projection.weight[:head] = 0.0
    second.q_proj.weight[channels] = math.sqrt(MATCH_GAIN) * code
    second.k_proj.weight[channels, CODE_START + torch.arange(CODE)] = math.sqrt(MATCH_GAIN)
    second.v_proj.weight[:head] = copy
    second.o_proj.weight[:, :head] = COPY_GAIN * copy.t()
