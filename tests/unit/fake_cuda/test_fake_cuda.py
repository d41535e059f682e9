"""The fake GPU shows what a real one would: late copies, memory that is used again, streams that wait for nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdec.engine.cuda.passes import CudaCapture
from tests.support.engine.triton_device import DEVICE
from tests.support.fake_cuda.device import FakeDevice
from tests.support.fake_cuda.install import fake_cuda
from tests.support.fake_cuda.streams import UseAfterFree

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real one")


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_cuda() as device:
        yield device


def ones(number: int = 4) -> torch.Tensor:
    return torch.ones(number, device="cuda:0")


def test_a_pinned_buffer_that_is_filled_again_before_its_copy_has_ended_shows_in_the_copy(device: FakeDevice) -> None:
    pinned, pageable = torch.zeros(2, pin_memory=True), torch.zeros(2)
    copies = [each.to("cuda:0", non_blocking=True) for each in (pinned, pageable)]
    for each in (pinned, pageable):
        each.fill_(7.0)
    assert device.num_waits == 0
    assert [copy.tolist() for copy in copies] == [[7.0, 7.0], [0.0, 0.0]]


def test_what_is_copied_to_a_pinned_buffer_is_not_there_before_somebody_waits(device: FakeDevice) -> None:
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(ones(), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    assert pinned.tolist() == [0.0] * 4
    event.synchronize()
    assert pinned.tolist() == [1.0] * 4


def test_an_event_is_looked_at_in_vain_before_the_device_comes_to_it(device: FakeDevice) -> None:
    event = torch.cuda.Event(enable_timing=True)
    assert event.query()
    data = ones().mul_(2.0)
    event.record(torch.cuda.current_stream())
    assert [event.query(), event.query()] == [False, True]
    assert device.num_waits == 0
    assert data.tolist() == [2.0] * 4


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_waits_for_no_other_may_be_first(waits: bool, device: FakeDevice) -> None:
    data, side = ones().mul_(2.0), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        seen = data + 1.0
    side.synchronize()
    with torch.cuda.stream(side):
        assert (seen.tolist() == [3.0] * 4) == waits


def test_memory_that_nobody_holds_is_used_again_behind_what_is_in_its_stream(device: FakeDevice) -> None:
    data, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    in_order = data * 2.0
    with torch.cuda.stream(side):
        beside = data * 2.0
    del data
    assert in_order.tolist() == [2.0] * 4
    with torch.cuda.stream(side):
        assert all(value != value for value in beside.tolist()), "it was given to somebody else"


def test_a_graph_runs_what_was_captured_on_the_tensors_that_were_there(device: FakeDevice) -> None:
    data, factor = ones(), 2.0
    replay, result = CudaCapture()(lambda: data * factor)
    assert all(value != value for value in result.tolist()), "a capture computes nothing"
    factor = 5.0
    replay()
    assert result.tolist() == [2.0] * 4
    data.fill_(3.0)
    replay()
    assert result.tolist() == [6.0] * 4


def test_a_graph_whose_tensors_are_gone_is_found_out(device: FakeDevice) -> None:
    data, held = ones(), [ones()]
    replay, _ = CudaCapture()(lambda: data * held[0])
    replay()
    held.clear()
    with pytest.raises(UseAfterFree, match="mul"):
        replay()


def test_a_graph_finds_nothing_in_its_memory_that_it_has_not_written_in_the_same_replay(device: FakeDevice) -> None:
    replay, result = CudaCapture()(lambda: torch.empty(4, device="cuda:0") * 1.0)
    replay()
    assert all(value != value for value in result.tolist())


def test_after_a_capture_that_fails_work_goes_on_in_the_stream_before_and_more_is_captured(device: FakeDevice) -> None:
    capture, data, outer = CudaCapture(), ones(), torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="capture"):
        capture(lambda: data * float(data.sum()))
    assert torch.cuda.current_stream() is outer
    torch.cuda.empty_cache()
    with pytest.raises(IndexError):
        capture(lambda: data.select(0, 4))
    assert torch.cuda.current_stream() is outer
    replay, result = capture(lambda: data + 1.0)
    replay()
    assert result.tolist() == [2.0] * 4
