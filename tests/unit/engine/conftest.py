"""A sampler, on torch and on the native kernels."""

from __future__ import annotations

import pytest

from specdec.engine.native.build import NativeUnavailable, load_library
from specdec.engine.sampling.sampler import Sampler
from tests.support.engine.sampling_rows import VOCAB_SIZE, make_sampler


@pytest.fixture(params=["torch", "native"])
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


@pytest.fixture
def native() -> None:
    """Skip where the native kernels cannot be built."""
    try:
        load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def sampler(path: str) -> Sampler:
    return make_sampler(VOCAB_SIZE, path)
