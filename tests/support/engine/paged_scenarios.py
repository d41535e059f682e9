"""Ways in which an engine may compute a sequence, on a real model; logits are logged by the tokens of a row's path."""

from collections.abc import Iterable, Sequence

import torch

from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.engine.outputs import StepOutput
from specdec.engine.scheduler import Scheduler
from specdec.engine.tree import TokenTree

Path = tuple[int, ...]
Log = dict[Path, list[torch.Tensor]]


def random_tokens(count: int, seed: int, vocab_size: int) -> list[int]:
    """Random tokens that depend only on the arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, vocab_size, (count,), generator=generator)]


class Player:
    """An engine around a runner, with a log of all logits."""

    def __init__(self, runner: ModelRunner, max_batch_tokens: int = 512, num_blocks: int | None = None) -> None:
        self.pool = BlockPool(num_blocks or runner.num_blocks, runner.block_size)
        scheduler = Scheduler(self.pool, max_batch_tokens, 64, runner.max_model_len, runner.session_states())
        self.engine = Engine(runner, self.pool, scheduler)
        self.log: Log = {}
        self.num_preempted = 0

    def step(self) -> StepOutput | None:
        """Run one step of the engine and log its logits."""
        trees = {seq.seq_id: seq.tree for seq in self.engine.scheduler.sequences}
        output = self.engine.step()
        for item in output.items if output else ():
            assert output is not None
            end = item.start + item.num_new_tokens
            paths: list[Path] = [tuple(item.seq.token_ids[: i + 1]) for i in range(item.start, end)]
            tree = trees[item.seq.seq_id]
            for node in range(item.tree_nodes):
                assert tree is not None
                paths.append((*item.seq.token_ids, *(tree.token_ids[i] for i in tree.path(node))))
            rows = output.logits[item.rows]
            for path, row in zip(paths[len(paths) - len(rows) :], rows, strict=True):
                self.log.setdefault(path, []).append(row.clone())
        self.num_preempted += len(output.preempted) if output else 0
        return output

    def run(self) -> None:
        """Step until nothing can run."""
        while self.step() is not None:
            pass


def play_alone(runner: ModelRunner, tokens: Sequence[int], max_batch_tokens: int = 512) -> Log:
    """Prefill in chunks of at most ``max_batch_tokens``, with the logits of every token."""
    player = Player(runner, max_batch_tokens)
    player.engine.add(tokens, num_prompt_tokens=len(tokens), prompt_logits=True)
    player.run()
    return player.log


def play_in_batch(runner: ModelRunner, tokens: Sequence[int], others: Iterable[Sequence[int]]) -> Log:
    """Prefill beside other sequences, in chunks that mix them."""
    player = Player(runner, 100)
    for other in others:
        player.engine.add(other, num_prompt_tokens=len(other), prompt_logits=True)
    player.engine.add(tokens, num_prompt_tokens=len(tokens), prompt_logits=True)
    player.run()
    return player.log


def play_decodes(runner: ModelRunner, tokens: Sequence[int], num_prompt_tokens: int) -> Log:
    """Append the tokens after the prompt one by one."""
    player = Player(runner)
    seq = player.engine.add(tokens[:num_prompt_tokens], num_prompt_tokens=num_prompt_tokens)
    player.run()
    for token in tokens[num_prompt_tokens:]:
        player.engine.append(seq, [token])
        player.run()
    return player.log


def play_trees(runner: ModelRunner, tokens: Sequence[int], num_prompt_tokens: int, wrong: Sequence[int]) -> Log:
    """Reach the tokens after the prompt as nodes of branching trees, among wrong ones, three at a time."""
    player = Player(runner)
    seq = player.engine.add(tokens[:num_prompt_tokens], num_prompt_tokens=num_prompt_tokens)
    player.run()
    at = num_prompt_tokens
    while at + 3 <= len(tokens):
        a, b, c = tokens[at : at + 3]
        x, y, z = wrong[:3]
        tree = TokenTree([x, a, y, b, z, c, x], [-1, -1, 0, 1, 1, 3, 3])
        seq.tree = tree
        player.step()
        player.engine.accept(seq, [1, 3, 5])
        at += 3
    return player.log


def play_rollback(runner: ModelRunner, tokens: Sequence[int], num_prompt_tokens: int, wrong: Sequence[int]) -> Log:
    """Compute wrong tokens after the prompt, roll them back, and compute the right ones in their slots."""
    player = Player(runner)
    seq = player.engine.add(tokens[:num_prompt_tokens], num_prompt_tokens=num_prompt_tokens)
    player.run()
    player.engine.append(seq, wrong)
    player.run()
    player.engine.rollback(seq, num_prompt_tokens)
    player.engine.append(seq, tokens[num_prompt_tokens:])
    player.run()
    return player.log


def play_fork(runner: ModelRunner, tokens: Sequence[int], num_prompt_tokens: int, wrong: Sequence[int]) -> Log:
    """Fork within a block; parent and child continue with different tokens, the parent first."""
    player = Player(runner)
    parent = player.engine.add(tokens[:num_prompt_tokens], num_prompt_tokens=num_prompt_tokens)
    player.run()
    child = player.engine.fork(parent)
    player.engine.append(parent, wrong)
    player.run()
    player.engine.append(child, tokens[num_prompt_tokens:])
    player.run()
    player.engine.append(parent, wrong[:1])
    player.run()
    return player.log


def play_cache_hit(runner: ModelRunner, tokens: Sequence[int]) -> Log:
    """Run the same tokens twice: the second time their full blocks come from the prefix cache."""
    player = Player(runner)
    for _ in range(2):
        seq = player.engine.add(tokens, num_prompt_tokens=len(tokens))
        player.run()
        player.engine.free(seq)
    assert player.engine.stats().prefix_hit_tokens > 0
    return player.log


def play_preemption(runner: ModelRunner, tokens: Sequence[int], num_prompt_tokens: int, other: Sequence[int]) -> Log:
    """Decode beside a sequence that outranks it, in a pool too small for both."""
    blocks = -(-len(tokens) // runner.block_size) + 1
    player = Player(runner, num_blocks=blocks)
    seq = player.engine.add(tokens[:num_prompt_tokens], num_prompt_tokens=num_prompt_tokens, priority=1)
    player.run()
    first = player.engine.add(other, num_prompt_tokens=len(other), priority=0)
    for token in tokens[num_prompt_tokens:]:
        player.engine.append(seq, [token])
        player.step()
    player.engine.free(first)
    player.run()
    assert player.num_preempted > 0
    return player.log
