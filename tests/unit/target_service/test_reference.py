"""The reference of both modes of verification against the code that serves, on random trees and logits."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import TargetSettings
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sequence import Sequence
from specdec.replica.worker.sessions import Owner
from specdec.target_service.admission.opening import new_session
from specdec.target_service.masks import MaskFilling
from specdec.target_service.sample_and_walk import Candidate, decide
from specdec.target_service.session import TargetSession
from specdec.target_service.tree import reference
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES
from specdec.wire.sampling_params import RejectionMethod
from tests.support.engine.local_pair import open_session

VOCAB_SIZE = 5
PROMPT = [1, 2, 3]
SEEDS = st.integers(min_value=0, max_value=2**64 - 1)
TOKENS = st.integers(min_value=0, max_value=VOCAB_SIZE - 1)
MASSES = st.dictionaries(TOKENS, st.floats(min_value=0.0625, max_value=1.0, width=32), min_size=1)


def session_of(mode: pb.VerifyMode.ValueType, temperature: float, seed: int, proposal: pb.Proposal) -> TargetSession:
    """A session that has its prompt only, and a proposal in its tree."""
    body = open_session(PROMPT, verify_mode=mode, temperature=temperature, seed=seed, max_tokens=1000)
    session = new_session(
        Owner("a", 0, 1),
        "s",
        1,
        body,
        identity=pb.ModelIdentity(vocab_size=VOCAB_SIZE, max_model_len=2000),
        settings=TargetSettings(model="any"),
        drafters=(),
        now_s=0.0,
        piece_bytes=MIN_MESSAGE_BYTES,
    )
    session.begin(Sequence(seq_id=0, token_ids=list(PROMPT), num_prompt_tokens=len(PROMPT)))
    session.tree.merge(proposal, session.token_ids)
    return session


def target(seed: int, path: tuple[int, ...]) -> torch.Tensor:
    """Logits that any token drafted before changes."""
    generator = torch.Generator().manual_seed(hash((seed, path)) % 2**63)
    return 2.0 * torch.randn(VOCAB_SIZE, generator=generator)


def walked(session: TargetSession, model_seed: int) -> list[int]:
    """What the code that serves commits when all of the session's tree is verified."""
    tree, chosen = session.tree.select(list(range(len(session.tree))))
    paths = [tuple(tree.token_ids[above] for above in tree.path(node)) for node in range(-1, len(tree))]
    logits = torch.stack([target(model_seed, path) for path in paths])
    candidate = Candidate(session, root_row=0, tree=tree, num_nodes=len(tree), chosen=chosen)
    [decision], _ = decide([candidate], logits, Sampler(VOCAB_SIZE, "cpu", native="off"), MaskFilling(None))
    return decision.walk.token_ids


@given(
    nodes=st.lists(st.tuples(TOKENS, st.integers(min_value=-1, max_value=11)), max_size=12),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    seed=SEEDS,
    model_seed=SEEDS,
)
def test_the_coupled_walk_is_the_reference(
    nodes: list[tuple[int, int]], temperature: float, seed: int, model_seed: int
) -> None:
    parents = [min(parent, index - 1) for index, (_, parent) in enumerate(nodes)]
    proposal = pb.Proposal(start_position=len(PROMPT), token_ids=[token for token, _ in nodes], parents=parents)
    session = session_of(pb.VERIFY_MODE_COUPLED, temperature, seed, proposal)
    tokens = session.tree.tokens
    paths = {tuple(tokens.token_ids[above] for above in tokens.path(node)) for node in range(len(tokens))}
    expected = reference.coupled(paths, lambda path: target(model_seed, path), temperature, seed, len(PROMPT))
    assert walked(session, model_seed) == expected


@given(
    drafts=st.lists(st.tuples(MASSES, st.integers(min_value=0, max_value=VOCAB_SIZE - 1)), max_size=8),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=SEEDS,
    model_seed=SEEDS,
    is_block=st.booleans(),
)
def test_the_rejection_walk_is_the_reference(
    drafts: list[tuple[dict[int, float], int]], temperature: float, seed: int, model_seed: int, is_block: bool
) -> None:
    proposal, chain = pb.Proposal(start_position=len(PROMPT)), []
    for masses, which in drafts:
        token, total = sorted(masses)[which % len(masses)], math.fsum(masses.values())
        proposal.token_ids.append(token)
        proposal.distributions.add(token_ids=list(masses), probs=list(masses.values()))
        chain.append((token, {other: mass / total for other, mass in masses.items()}))
    session = session_of(pb.VERIFY_MODE_REJECTION, temperature, seed, proposal)
    rule = reference.rejection
    if is_block:
        session.rejection_method, rule = RejectionMethod.BLOCK, reference.block
    expected = rule(chain, lambda path: target(model_seed, path), temperature, seed, len(PROMPT))
    assert walked(session, model_seed) == expected
