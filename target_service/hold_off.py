"""How long a step waits for a draft: pure functions.

A session without a proposal can decode plainly at once (one token in ``T(1)``), or wait until the draft has sent ``k``
nodes and verify them. The draft needs ``first_s`` to answer a verdict with its first node and ``node_s`` for each
further one. With acceptance ``a`` per node, waiting for ``k`` nodes commits ``1 + a + ... + a^k`` tokens in
``first_s + (k - 1) node_s + T(1 + k)``. Deciding plainly commits one token in ``T(1)``, during which the draft goes
on: with probability ``a`` its first node was right and the ``m`` nodes that it drafted meanwhile are verified next.
The wait is worth it when its rate is higher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class DraftLatency:
    """Moving averages of how fast the drafts answer, in seconds.

    Attributes:
        first_s: from a verdict that left no proposal to the first usable node.
        node_s: from one node to the next.
    """

    first_s: float = 0.005
    node_s: float = 0.003
    weight: float = 0.1

    def observe_first(self, elapsed_s: float) -> None:
        """A proposal answered a verdict after `elapsed_s`."""
        self.first_s += self.weight * (elapsed_s - self.first_s)

    def observe_node(self, elapsed_s: float) -> None:
        """A further node took `elapsed_s`."""
        self.node_s += self.weight * (elapsed_s - self.node_s)


def expected_tokens(acceptance: float, num_nodes: int) -> float:
    """Tokens that a step commits on average when it verifies a chain of `num_nodes`: 1 + a + ... + a^n."""
    return sum(acceptance**depth for depth in range(num_nodes + 1))


def nodes_to_wait_for(acceptance: float, latency: DraftLatency, step_s: Callable[[int], float], max_nodes: int) -> int:
    """How many nodes are worth waiting for; 0: decode plainly now.

    Args:
        acceptance: probability that a node is accepted when its parent is.
        latency: how fast the draft answers.
        step_s: time of a step by number of rows.
        max_nodes: most nodes that may be verified.
    """
    plain_s = step_s(1)
    meanwhile = int(max(0.0, (plain_s - latency.first_s) / latency.node_s)) if latency.node_s > 0 else max_nodes
    meanwhile = min(meanwhile, max_nodes)
    if meanwhile:
        later_tokens = acceptance * expected_tokens(acceptance, meanwhile) + (1 - acceptance)
        later_s = acceptance * step_s(1 + meanwhile) + (1 - acceptance) * plain_s
        best_rate = (1 + later_tokens) / (plain_s + later_s)
    else:
        best_rate = 1 / plain_s
    best = 0
    for count in range(1, max_nodes + 1):
        wait_s = latency.first_s + (count - 1) * latency.node_s
        rate = expected_tokens(acceptance, count) / (wait_s + step_s(1 + count))
        if rate > best_rate:
            best, best_rate = count, rate
    return best
