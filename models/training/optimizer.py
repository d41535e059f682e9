"""Muon for the hidden matrices, AdamW for the rest.

Muon: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon/, with decoupled weight decay as in Liu et al.,
"Muon is scalable for LLM training", arXiv:2502.16982.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Replace each matrix of (batch, rows, columns) by nearly its nearest semi-orthogonal one.

    Newton-Schulz iteration in bfloat16: singular values end up between about 0.7 and 1.2.
    """
    a, b, c = _QUINTIC
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2).contiguous()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; matrices of one shape are handled as one batch."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                directions = torch.stack([self._direction(p, group["momentum"]) for p in parameters])
                updates = orthogonalize(directions).to(parameters[0].dtype)
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Return the Nesterov momentum and update its buffer."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum"]
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


class SplitOptimizer:
    """Both optimisers of one model behind one ``step``, with one factor on both learning rates."""

    def __init__(self, model: nn.Module, matrix_lr: float, vector_lr: float, weight_decay: float) -> None:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        vectors = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self._optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=matrix_lr, weight_decay=weight_decay),
            torch.optim.AdamW(vectors, lr=vector_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
        ]
        self._peaks = [matrix_lr, vector_lr]

    def step(self, factor: float) -> None:
        """Apply the gradients at ``factor`` times the peak learning rates, then clear them."""
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
