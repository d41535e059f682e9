"""A constraint's effect on proposals: forbidden nodes are dropped, and forced tokens are proposed."""

from __future__ import annotations

from specdec.engine.tree import ROOT
from specdec.target_service.session import TargetSession
from specdec.target_service.tree.proposed import Node
from specdec.wire.sampling_params import VerifyMode


def drop_illegal(session: TargetSession) -> None:
    """Drop nodes that the session's constraint forbids, with all nodes below them.

    In rejection mode the first forbidden node of a chain stays: whether a token is verified must not depend on which
    one was drawn. The target then rejects it, as its probability is 0. Cost: about 1 us per node.
    """
    grammar, tokens = session.grammar, session.tree.tokens
    if grammar is None or not len(session.tree):
        return
    legal = grammar.legal_nodes(tokens.token_ids, tokens.parents)
    if all(legal):
        return
    if session.mode is VerifyMode.REJECTION:
        nodes = zip(legal, tokens.parents, session.tree.nodes, strict=True)
        session.tree.retain([is_legal or (node.is_drawn and (p < 0 or legal[p])) for is_legal, p, node in nodes])
    else:
        session.tree.retain(legal)


def hang_forced(session: TargetSession) -> None:
    """Propose the forced tokens after the committed ones.

    They depend on committed tokens alone, so rejection verification may use them: each is drawn from a point mass.
    Nothing is proposed for a session in rejection mode that has a chain already.
    """
    grammar, tree = session.grammar, session.tree
    if grammar is None or (tree.is_chain and len(tree)):
        return
    node: int | None = ROOT
    for token in grammar.forced(limit=min(session.max_nodes, session.end.max_depth(session.num_tokens))):
        if node is None:
            return
        node = tree.place(node, token, Node(1.0, (token,), (1.0,), is_forced=True))
