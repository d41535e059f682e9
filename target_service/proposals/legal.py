"""What a constraint makes of proposals: what it rules out is dropped; what it leaves no choice about is proposed."""

from __future__ import annotations

from specdec.engine.tree import ROOT
from specdec.target_service.session import TargetSession
from specdec.target_service.tree.speculation_tree import Node
from specdec.wire.sampling_params import VerifyMode


def drop_illegal(session: TargetSession) -> None:
    """Drop nodes that the session's constraint does not allow, with all that hangs below them.

    For rejection verification the first of them stays: that a token is verified must not depend on which one was drawn.
    It is rejected, as the target never samples it. Cost: about 1 us per node.
    """
    grammar, tokens = session.grammar, session.tree.tokens
    if grammar is None or not len(session.tree):
        return
    keep = grammar.legal_nodes(tokens.token_ids, tokens.parents)
    if session.mode is VerifyMode.REJECTION and not all(keep):
        keep[keep.index(False)] = True
    if not all(keep):
        session.tree.retain(keep)


def hang_forced(session: TargetSession) -> None:
    """Propose what must follow the committed tokens, each being the only one that is allowed.

    It depends on committed tokens alone, so it is fit for rejection verification, too: each is drawn from what has no
    other token. Nothing is done where a chain hangs already.
    """
    grammar, tree = session.grammar, session.tree
    if grammar is None or (tree.is_chain and len(tree)):
        return
    node: int | None = ROOT
    for token in grammar.forced(limit=min(session.max_nodes, session.end.max_depth(session.num_tokens))):
        if node is None:
            return
        node = tree.place(node, token, Node(1.0, (token,), (1.0,), is_forced=True))
