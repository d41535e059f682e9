"""A target whose steps a device computes late, for all tests of this folder that a worker runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.late_device import LateDevice, unhurried
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.overlapping import loaded_on_late_device, truth_of, undisturbed
from tests.support.engine.targets import target_client
from tests.support.engine.worker_client import WorkerClient


@pytest.fixture(scope="package")
def loaded() -> tuple[LocalPair, LateDevice]:
    return loaded_on_late_device()


@pytest.fixture
def device(loaded: tuple[LocalPair, LateDevice]) -> LateDevice:
    return undisturbed(loaded[1])


@pytest.fixture
def client(loaded: tuple[LocalPair, LateDevice], device: LateDevice) -> Iterator[WorkerClient]:
    with target_client(loaded[0], unhurried()) as client:
        yield client


@pytest.fixture(scope="package")
def truth(loaded: tuple[LocalPair, LateDevice]) -> dict[str, list[int]]:
    return truth_of(*loaded)
