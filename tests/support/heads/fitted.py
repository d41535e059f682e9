"""A head with some acceptance, made in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec.config.drafter_options import EagleOptions
from tests.support.engine.local_pair import MODELS, LocalPair, open_session, prompts
from tests.support.heads.checkpoints import Sizes, Tensors, eagle, save


def right_eagle(pair: LocalPair, folder: Path) -> EagleOptions:
    """Write an EAGLE-1 head for the shipped target to a folder, fitted on the target's output."""
    pair.reset()
    opens = {str(i): open_session(prompts()[i], max_tokens=160, temperature=0.7, ignore_eos=True) for i in range(12)}
    texts = [[*prompts()[int(key)], *out.token_ids] for key, out in pair.run(opens, use_draft=False).items()]
    pair.reset()
    return EagleOptions(model=str(save(folder, *fitted_eagle(str(MODELS / "target"), texts))))


def fitted_eagle(target: str, texts: list[list[int]]) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of an EAGLE-1 head that maps token and state linearly to the next state.

    The map is fitted on a target's states for these texts, and the head's layer adds zero. Targets accept enough of its
    tokens for tests of acceptance.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    embedding = model.get_input_embeddings().weight.detach()
    inputs, outputs = [], []
    with torch.inference_mode():
        for tokens in texts:
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
            inputs.append(torch.cat([embedding[tokens[1:]], states[:-1]], dim=1))
            outputs.append(states[1:])
    x, y = torch.cat(inputs).double(), torch.cat(outputs).double()
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    solved = torch.linalg.solve(x.T @ x + 1e-1 * torch.eye(x.shape[1]), x.T @ y).float()
    width = embedding.shape[1]
    sizes = Sizes(vocab=embedding.shape[0], target=width, width=width, inner=8, dim=16)
    config, tensors = eagle(sizes)
    tensors["embed_tokens.weight"] = embedding.clone()
    tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    tensors["fc.weight"], tensors["fc.bias"] = solved[:-1].T.contiguous(), solved[-1].clone()
    tensors["layers.0.self_attn.o_proj.weight"].zero_()
    tensors["layers.0.mlp.down_proj.weight"].zero_()
    return config, tensors
