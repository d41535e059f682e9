"""From a step's logits to each session's committed tokens: one sampling call over all rows, then a walk per session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import cast

import torch

from specdec.constraints.grammar.follower import MaskWords, NodeMask
from specdec.constraints.limits.faults import GrammarError
from specdec.engine.errors import NonFiniteLogits
from specdec.engine.flight import Flight
from specdec.engine.sampling.block_verification import verify_block
from specdec.engine.sampling.rejection import verify_token
from specdec.engine.sampling.restrictions import masked_logits
from specdec.engine.sampling.sampler import DraftSample, RowContext, Sampler
from specdec.engine.tree import NO_TREE, TokenTree
from specdec.target_service.logprobs import node_logprobs, position_logprobs
from specdec.target_service.masks import MaskFilling
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.tree.walk import Walk, walk_tree
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import RejectionMethod, VerifyMode


@dataclass(slots=True)
class Candidate:
    """A session whose pending tokens a step has computed."""

    session: TargetSession
    """The session, whose sequence holds the committed tokens."""
    root_row: int
    """Row of the logits that decides the next token; node ``i`` has row ``root_row + 1 + i``."""
    tree: TokenTree
    """Nodes that were chosen for the step."""
    num_nodes: int
    """Number of leading nodes of `tree` that were verified."""
    chosen: list[int]
    """For each node of `tree`, its index in the session's speculation tree."""


@dataclass(slots=True)
class Decision:
    """Tokens that a step commits for a session, with log-probabilities where they are wanted."""

    candidate: Candidate
    walk: Walk
    accepted: list[int]
    """Accepted nodes of the session's speculation tree, from the root down."""
    logprobs: list[pb.PositionLogprobs]
    node_logprobs: list[float]
    """Log-probabilities of the verified nodes, if the session's trees are reported; else empty."""
    tokens: Sequence[int | None] = ()
    """Token drawn after the last committed token and after each verified node, accepted or not; None: none possible."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """A session that a step cannot decide on, because of its logits or its constraint."""

    session: TargetSession
    error: NonFiniteLogits | GrammarError


@dataclass(slots=True)
class Drawn:
    """Tokens of a step's rows, drawn behind its pass."""

    sessions: set[TargetSession]
    """Sessions whose rows these are."""
    contexts: list[RowContext]
    """Context of each row of the logits."""
    tokens: Sequence[int | None]
    """Token of each row; None: none possible."""


def draw_behind(flight: Flight, by_seq: Mapping[int, TargetSession], sampler: Sampler) -> Callable[[], Drawn] | None:
    """Launch the sampling of a step behind its pass; the returned function waits for the tokens.

    None: a row awaits a mask or belongs to a prompt, or the pass is over: `decide` samples.
    """
    sessions: set[TargetSession] = set()
    contexts: list[RowContext] = []
    for item in flight.items:
        seq = item.seq
        session = by_seq[seq.seq_id]
        if session.grammar is not None or session.apart is not None or seq.prompt_logits:
            return None
        if item.rows.start < item.rows.stop:
            sessions.add(session)
            contexts += _contexts(session, seq.tree or NO_TREE, item.tree_nodes)
    started = flight.behind(lambda logits: sampler.start(logits, contexts)) if contexts else None
    return None if started is None else lambda: Drawn(sessions, contexts, started()())


def decide(
    candidates: list[Candidate],
    logits: torch.Tensor,
    sampler: Sampler,
    filling: MaskFilling,
    drawn: Drawn | None = None,
) -> tuple[list[Decision], list[Undecided]]:
    """Sample the row of every last committed token and verified node, and walk every tree.

    Rows off the walked paths decide nothing and may hold NaN. Masks that were not filled during the forward pass are
    filled here, while a GPU may still compute the logits.

    Args:
        candidates: sessions to decide on; forks of one prompt share a row.
        logits: [R, V] float32.
        sampler: draws by the shared noise.
        filling: masks of the sessions' constraints.
        drawn: what was drawn behind the pass; other sessions, such as new forks, are sampled now.

    Returns:
        The decisions, and the sessions whose walk met non-finite logits or a fault of their constraint.
    """
    late = candidates if drawn is None else [each for each in candidates if each.session not in drawn.sessions]
    of_sessions = _sampled(late, logits, sampler, filling) if late else []
    if drawn is not None:
        early = candidates if not late else [each for each in candidates if each.session in drawn.sessions]
        of_sessions += [_Rows(each, logits, drawn.contexts, drawn.tokens, each.root_row, {}) for each in early]
    decisions: list[Decision] = []
    undecided: list[Undecided] = []
    for own in of_sessions:
        try:
            walk = own.walk(sampler)
            accepted = own.accepted(walk)
            logprobs, of_nodes = own.logprobs(walk, sampler), own.node_logprobs(sampler)
            decisions.append(Decision(own.candidate, walk, accepted, logprobs, of_nodes, own.drawn))
        except (NonFiniteLogits, GrammarError) as error:
            undecided.append(Undecided(own.candidate.session, error))
    return decisions, undecided


def _sampled(candidates: list[Candidate], logits: torch.Tensor, sampler: Sampler, filling: MaskFilling) -> list[_Rows]:
    """The candidates' rows, sampled now."""
    rows: list[int] = []
    contexts: list[RowContext] = []
    firsts: list[int] = []
    for candidate in candidates:
        firsts.append(len(rows))
        rows += range(candidate.root_row, candidate.root_row + 1 + candidate.num_nodes)
        contexts += _contexts(candidate.session, candidate.tree, candidate.num_nodes)
    masks, faults = _masks(candidates, firsts, contexts, filling)
    if rows != list(range(len(logits))):
        logits = logits.index_select(0, torch.tensor(rows).to(logits.device, non_blocking=True))
    needed = masked_logits(logits, masks)
    tokens = sampler.sample(needed, contexts)
    return [
        _Rows(candidate, needed, contexts, tokens, first, faults.get(first, {}))
        for candidate, first in zip(candidates, firsts, strict=True)
    ]


def _masks(
    candidates: list[Candidate], firsts: list[int], contexts: list[RowContext], filling: MaskFilling
) -> tuple[dict[int, MaskWords], dict[int, dict[int, GrammarError]]]:
    """Masks by row, and by the first row of a candidate the faults of its constraint by node.

    Sets `must_end` in `contexts` where a constraint is complete.
    """
    words: dict[int, MaskWords] = {}
    faults: dict[int, dict[int, GrammarError]] = {}
    for candidate, first in zip(candidates, firsts, strict=True):
        apart = candidate.session.apart
        if apart is not None and apart.mask is not None:
            found: Sequence[NodeMask] = (apart.mask,)
        elif candidate.session.grammar is not None:
            found = filling.take(candidate.session, candidate.tree, candidate.num_nodes)
        else:
            continue
        for index, mask in enumerate(found):
            if mask.words is not None:
                words[first + index] = mask.words
            if mask.must_end:
                contexts[first + index] = contexts[first + index]._replace(must_end=True)
            if mask.fault is not None:
                faults.setdefault(first, {})[index - 1] = mask.fault
    return words, faults


@dataclass(slots=True)
class _Rows:
    """One candidate's rows: `first` decides the token after the committed ones, ``first + 1 + i`` the one after node
    ``i``."""

    candidate: Candidate
    logits: torch.Tensor
    contexts: Sequence[RowContext]
    tokens: Sequence[int | None]
    first: int
    faults: dict[int, GrammarError]
    """Faults of the constraint, by the node after which it could not be followed."""

    @property
    def drawn(self) -> Sequence[int | None]:
        """Tokens of the rows."""
        return self.tokens[self.first : self.first + 1 + self.candidate.num_nodes]

    def walk(self, sampler: Sampler) -> Walk:
        """Walk the verified tree by the session's mode of verification."""
        candidate, session = self.candidate, self.candidate.session
        num_tokens, decider = session.num_tokens, self._decider(sampler)
        is_first = session.state is SessionState.PREFILL and num_tokens == session.end.num_prompt_tokens
        plain_origin = pb.ORIGIN_PREFILL if is_first else pb.ORIGIN_DECODE
        return walk_tree(candidate.tree, candidate.num_nodes, decider, session.end, num_tokens, plain_origin)

    def accepted(self, walk: Walk) -> list[int]:
        """The accepted nodes of the session's tree; tokens that a constraint forces get their origin."""
        nodes = self.candidate.session.tree.nodes
        accepted = [self.candidate.chosen[node] for node in walk.path]
        for index, node in enumerate(accepted):
            if nodes[node].is_forced:
                walk.origins[index] = pb.ORIGIN_FORCED
        return accepted

    def logprobs(self, walk: Walk, sampler: Sampler) -> list[pb.PositionLogprobs]:
        """Raw log-probabilities of the committed tokens, masked under a constraint; empty where none are wanted."""
        if self.candidate.session.params.num_logprobs is None:
            return []
        rows = [self.first + 1 + node for node in walk.rows]
        contexts = [self.contexts[row] for row in rows]
        return [position_logprobs(entry) for entry in sampler.logprobs(self.logits[rows], contexts, walk.token_ids)]

    def node_logprobs(self, sampler: Sampler) -> list[float]:
        """Log-probabilities of the verified nodes after their parents; empty where trees are not reported."""
        candidate, num_nodes = self.candidate, self.candidate.num_nodes
        if not (num_nodes and candidate.session.body.tells_trees):
            return []
        rows = [self.first + 1 + parent for parent in candidate.tree.parents[:num_nodes]]
        return node_logprobs(self.logits[rows], candidate.tree.token_ids[:num_nodes], sampler.vocab_size)

    def _coupled(self, node: int) -> int:
        token = self.tokens[self.first + 1 + node]
        if token is None or node in self.faults:
            raise self.faults.get(node) or self._nothing_left(self.first + 1 + node)
        return token

    def _nothing_left(self, row: int) -> NonFiniteLogits | GrammarError:
        """Why a row has no token: the model, or a constraint and other parameters that allow none in common."""
        session = self.candidate.session
        is_masked = session.grammar is not None or session.apart is not None
        logits = self.logits[row, : session.tree.vocab_size]
        if not is_masked or bool((logits.isnan() | (logits == torch.inf)).any()):
            return NonFiniteLogits()
        field = "allowed_token_ids" if session.params.allowed_token_ids else "constraint"
        return GrammarError(field, "the constraint and the other parameters allow no token in common here")

    def _decider(self, sampler: Sampler) -> Callable[[int], int]:
        session = self.candidate.session
        if session.mode is VerifyMode.COUPLED:
            drawn = self.drawn
            if self.faults or None in drawn:
                return self._coupled
            return cast("Callable[[int], int]", [*drawn[1:], drawn[0]].__getitem__)  # `ROOT` is the last index
        if session.rejection_method is RejectionMethod.BLOCK:
            return self._block(sampler)
        return self._rejection(sampler)

    def _rejection(self, sampler: Sampler) -> Callable[[int], int]:
        parents = self.candidate.tree.parents[: self.candidate.num_nodes]

        def decide_token(node: int) -> int:
            row = self.first + 1 + node
            if parents.count(node) != 1 or node in self.faults or self.tokens[row] is None:
                return self._coupled(node)
            context = self.contexts[row]
            probs = sampler.probs(self.logits[row : row + 1], [context])[0]
            return verify_token(probs, self._drawn(parents.index(node)), context.params, context.position)[1]

        return decide_token

    def _block(self, sampler: Sampler) -> Callable[[int], int]:
        """Block verification of a chain, whose node ``i`` row ``i`` decides, up to a row with NaN or a fault."""
        num_nodes = min([self.candidate.num_nodes, *(1 + node for node in self.faults)])
        if num_nodes == 0:
            return self._coupled
        rows = slice(self.first, self.first + num_nodes)
        probs = sampler.probs(self.logits[rows], self.contexts[rows])
        is_bad = probs.isnan().any(dim=1).tolist()
        num_nodes = is_bad.index(True) if True in is_bad else num_nodes
        if num_nodes == 0:
            return self._coupled
        drawn = [self._drawn(node) for node in range(num_nodes)]
        context = self.contexts[self.first]
        num_accepted, instead = verify_block(probs[:num_nodes], drawn, context.params, context.position)

        def decide_token(node: int) -> int:
            if node + 1 < num_accepted:
                return drawn[node + 1].token_id
            return self._coupled(node) if node + 1 > num_accepted or instead is None else instead

        return decide_token

    def _drawn(self, node: int) -> DraftSample:
        payload = self.candidate.session.tree.nodes[self.candidate.chosen[node]]
        return DraftSample(self.candidate.tree.token_ids[node], payload.token_ids, payload.probs)


def _contexts(session: TargetSession, tree: TokenTree, num_nodes: int) -> list[RowContext]:
    """Contexts of the last committed token's row, then of each verified node's.

    Cost: per node a tuple of its path where the tokens before it count; else one context for each depth.
    """
    params, num_tokens, num_prompt_tokens = session.params, session.num_tokens, session.end.num_prompt_tokens
    if not params.needs_history:
        depths = tree.depths[:num_nodes]
        end = num_tokens + 1 + max(depths, default=0)
        by_depth = [*map(RowContext, repeat(params), range(num_tokens, end), repeat(num_prompt_tokens))]
        return [by_depth[0], *map(by_depth.__getitem__, depths)]
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[:num_nodes], tree.parents, strict=False):
        paths.append((*paths[parent + 1], token))
    return [
        RowContext(
            params=params,
            position=num_tokens + len(path),
            num_prompt_tokens=num_prompt_tokens,
            history=session.history,
            extra_tokens=path,
        )
        for path in paths
    ]
