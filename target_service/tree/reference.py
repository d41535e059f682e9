"""All ways of verification on one screen: `sample_and_walk.py` and `walk.py` for one session.

Only a test runs it, and compares it with the real walk on random trees and logits. ``target`` is the model: it maps the
drafted tokens after the last committed one to logits [V] float32 of the next token. ``t`` is the position of the first
decided token. Penalties, cuts and the end of a choice are left out.
"""

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor

from specdec.engine.sampling.noise import Purpose, gumbel, noise_key, uniform

Path = tuple[int, ...]
Target = Callable[[Path], Tensor]


def coupled(tree: Set[Path], target: Target, temperature: float, seed: int, t: int) -> list[int]:
    """The target's own tokens while the tree has them, and one more: the tree decides only their number."""
    path: Path = ()
    while path == () or path in tree:
        path += (sample(target(path), temperature, seed, t + len(path)),)
    return list(path)


def rejection(
    chain: Sequence[tuple[int, Mapping[int, float]]], target: Target, temperature: float, seed: int, t: int
) -> list[int]:
    """Each drafted x ~ q stays with probability min(1, p(x) / q(x)); else a sample of max(0, p - q) ends the round."""
    path: Path = ()
    for x, q in chain:
        p = torch.softmax(target(path).double() / temperature, dim=0)
        if uniform(seed, 0, Purpose.ACCEPT, t + len(path)) * q[x] >= p[x]:
            residual = torch.stack([p[token] - q.get(token, 0.0) for token in range(len(p))]).clamp(min=0)
            point = uniform(seed, 0, Purpose.RESIDUAL, t + len(path)) * residual.sum()
            return [*path, int(torch.searchsorted(residual.cumsum(0), point, right=True))]
        path += (x,)
    return [*path, sample(target(path), temperature, seed, t + len(path))]


def block(
    chain: Sequence[tuple[int, Mapping[int, float]]], target: Target, temperature: float, seed: int, t: int
) -> list[int]:
    """Block verification: at least i tokens are accepted with probability w[i] = min(1, w[i-1] p(x[i]) / q(x[i]))."""
    path: Path = ()
    w, stays, residuals = 1.0, 0, []
    for x, q in chain:
        p = torch.softmax(target(path).double() / temperature, dim=0)
        residual = torch.stack([w * p[token] - q.get(token, 0.0) for token in range(len(p))]).clamp(min=0)
        residuals.append(residual)
        accept = 1.0 if w == 1 else float(residual.sum() / (residual.sum() + 1 - w))
        stays = len(path) if path and uniform(seed, 0, Purpose.ACCEPT, t + len(path) - 1, t) < accept else stays
        path, w = (*path, x), min(1.0, w * float(p[x]) / q[x])
    if not chain or uniform(seed, 0, Purpose.ACCEPT, t + len(path) - 1, t) < w:
        return [*path, sample(target(path), temperature, seed, t + len(path))]
    point = uniform(seed, 0, Purpose.RESIDUAL, t + stays) * residuals[stays].sum()
    return [*path[:stays], int(torch.searchsorted(residuals[stays].cumsum(0), point, right=True))]


def sample(logits: Tensor, temperature: float, seed: int, t: int) -> int:
    """A sample of softmax(logits / temperature) by the Gumbel-max trick, the same wherever it is drawn."""
    if temperature == 0:
        return int(logits.argmax())
    noise = gumbel(torch.tensor([noise_key(seed, 0, Purpose.PLAIN, t)]), torch.arange(len(logits)))[0]
    return int(((logits - logits.max()) / temperature + noise).argmax())
