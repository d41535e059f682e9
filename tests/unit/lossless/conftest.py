"""The shipped pair, loaded once for all tests of this folder that a worker runs."""

from __future__ import annotations

import pytest

from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import UNLIMITED, LocalPair
from tests.support.engine.outcomes import Outcome
from tests.unit.lossless.sessions import Plainly, salts


@pytest.fixture(scope="package")
def loaded_pair() -> LocalPair:
    return LocalPair()


@pytest.fixture
def pair(loaded_pair: LocalPair) -> LocalPair:
    loaded_pair.reset()
    return loaded_pair


@pytest.fixture(scope="package")
def tight_pair() -> LocalPair:
    """So few blocks and rows that sessions are preempted and prompts come in chunks, at target and draft."""
    tight = {"num_blocks": 10, "max_batch_tokens": 20, "max_batch_seqs": 3}
    return LocalPair(draft_options=tight, **tight)


@pytest.fixture(scope="package")
def plainly(loaded_pair: LocalPair) -> Plainly:
    """Decode a session alone, without a draft, and without anything from the prefix cache."""
    known: dict[bytes, Outcome] = {}

    def decode(body: pb.OpenSession) -> Outcome:
        alone = pb.OpenSession()
        alone.CopyFrom(body)
        alone.speculate = False
        alone.fork_from = ""
        alone.credit_position = UNLIMITED
        alone.ClearField("max_draft_tokens")
        alone.cache_salt = b""
        key = alone.SerializeToString(deterministic=True)
        if key not in known:
            alone.cache_salt = b"plain %d" % next(salts)
            loaded_pair.reset()
            known[key] = loaded_pair.run({"alone": alone}, use_draft=False)["alone"]
            assert known[key].verdicts[0].num_cached_tokens == 0
            loaded_pair.reset()
        return known[key]

    return decode
