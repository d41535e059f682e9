"""Drawing of several tokens in one captured graph, without a GPU: interpreted kernels, and passes on the CPU."""

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.sampler import Sampler
from tests.support.engine.captures import Captures


def device_drawing_of(runner: ModelRunner) -> tuple[DeviceDrawing, Captures]:
    """Device drawing of a runner that has computed nothing yet; its cache gets one more block, for padding."""
    old, captures = runner._cache, Captures()
    runner._cache = KVCache(old.geometries, runner.num_blocks + 1, old.block_size, old.dtype, old.device)
    steps = BucketedSteps(runner._step_model, runner._cache, captures)
    sampler = Sampler(runner.vocab_size, runner.device)
    return DeviceDrawing(steps, runner.max_model_len, sampler), captures
