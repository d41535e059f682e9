"""Checks positions beyond the self-test: beside every switch that a model's config names.

Two proofs by single rows, which cost far less than a long prompt:

    places      short sequences at distant positions, in one batch against each alone: finds rope and scales that depend
    on length or batch long rows   rows that read long contexts (a few random blocks repeated), by the serving kernels
    against plain attention: finds faults of windows, sinks, tiles and splits at full length, in rows of one token, in a
    chunk that crosses the end of a split, and in a branching tree
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, RecordingKernel
from specdec.engine.attention.torch_kernels import GatherAttention
from specdec.engine.batch import Batch
from specdec.engine.errors import ModelNotSupported
from specdec.engine.model.beside import PassRows
from specdec.engine.model.loader import LoadedModel
from specdec.engine.model.mixtures.routes import Routes
from specdec.engine.model.model_check import refusing
from specdec.engine.model.proofs.probe import FORBIDDEN, tolerance
from specdec.engine.model.ragged import RaggedModel, StepModel

_NAMES = re.compile(r"position|window|chunk|floor|_len|max_seq|ctx")
_BLOCKS = 7  # random blocks that contexts repeat; no divisor of a tile or a split
_LONG = 2100  # a position beyond blocks, tiles and splits
_CHUNK = range(760, 780)  # positions on both sides of the end of a split and of tiles
_NUM_NODES = 3
_SEED = 21

Forward = Callable[[Batch, KVCache], torch.Tensor]
PlacedForward = Callable[[Batch, KVCache, torch.Tensor], torch.Tensor]


def switches(config: PreTrainedConfig, num_positions: int) -> list[int]:
    """Positions that a config names below ``num_positions``, ascending, and ``num_positions``."""
    named = {value for value in _named(config.to_dict()) if 1 < value < num_positions}
    return [*sorted(named), num_positions]


def _named(values: dict[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _named(value)
        elif isinstance(value, int) and not isinstance(value, bool) and _NAMES.search(name):
            yield value


class FarPlaces:
    """Short sequences around each switch."""

    def __init__(self, at: Sequence[int], vocab_size: int, block_size: int, device: torch.device) -> None:
        spans = [sorted({0, end // 3, *range(max(0, end - 2), min(end + 2, at[-1]))}) for end in at]
        self._spans = [list(range(min(4, at[-1]))), *spans]
        generator = torch.Generator().manual_seed(_SEED)
        longest = max(map(len, self._spans))
        self._tokens = torch.randint(0, vocab_size, (longest,), generator=generator).tolist()
        self._num_blocks = -(-longest // block_size)
        self._block_size, self._device = block_size, device

    def difference(
        self, forward: PlacedForward, geometries: Sequence[LayerGeometry], dtype: torch.dtype, routes: Routes
    ) -> float:
        """Root mean square difference between the logits in one batch and alone, over the latter's standard
        deviation.
        """
        num_blocks = self._num_blocks * len(self._spans)
        cache = KVCache(geometries, num_blocks, self._block_size, dtype, self._device)
        alone = []
        for number, span in enumerate(self._spans):
            with routes.recording([(number, place) for place in range(len(span))]):
                alone.append(self._logits(forward, cache, [span]))
        with routes.following(
            [(number, place) for number, span in enumerate(self._spans) for place in range(len(span))]
        ):
            together = self._logits(forward, cache, self._spans)
        return _difference(together, torch.cat(alone))

    def _logits(self, forward: PlacedForward, cache: KVCache, spans: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = PassRows(self._block_size)
        for number, span in enumerate(spans):
            rows.add_sequence(range(number * self._num_blocks, (number + 1) * self._num_blocks))
            for place, token in zip(range(len(span)), self._tokens, strict=False):
                rows.add(token, place)
        positions = torch.tensor([position for span in spans for position in span], device=self._device)
        return forward(rows.batch(self._device), cache, positions)


class LongRows:
    """One row after each of several long contexts, and a chunk of rows with a tree below its last one."""

    def __init__(
        self,
        options: Sequence[AttentionOptions],
        geometries: Sequence[LayerGeometry],
        num_positions: int,
        vocab_size: int,
        block_size: int,
    ) -> None:
        windows = {option.sliding_window for option in options if option.sliding_window}
        ends = {window + beside for window in windows for beside in (0, block_size + 3)} | {_LONG}
        generator = torch.Generator().manual_seed(_SEED)
        self._rows = PassRows(block_size)
        self._geometries = geometries
        self.num_blocks = _BLOCKS
        """Blocks of a cache that the rows read and write."""

        def token() -> int:
            return int(torch.randint(0, vocab_size, (), generator=generator))

        for position in sorted({min(end, num_positions - 1) for end in ends}):
            shared = [block % _BLOCKS for block in range(position // block_size)]
            self._rows.add_sequence([*shared, self.num_blocks])
            self.num_blocks += 1  # the row's own block, which it writes
            self._rows.add(token(), position)
        end = min(_CHUNK.stop, num_positions - 2)
        if end <= len(_CHUNK):
            return
        first = end - len(_CHUNK)
        shared = [block % _BLOCKS for block in range(first // block_size)]
        last_block = (end + _NUM_NODES - 1) // block_size
        own = range(self.num_blocks, self.num_blocks + last_block + 1 - len(shared))
        self.num_blocks += len(own)
        self._rows.add_sequence([*shared, *own])
        for position in range(first, end):
            self._rows.add(token(), position)
        slots = [
            own[slot // block_size - len(shared)] * block_size + slot % block_size
            for slot in range(end, end + _NUM_NODES)
        ]
        for path in (slots[:1], slots[1:2], [slots[0], slots[2]]):  # two children, and a child of the first
            self._rows.add_apart(token(), end, path)

    @property
    def keys(self) -> list[tuple[str, int]]:
        """A name of each row."""
        return [("long", row) for row in range(len(self._rows))]

    def logits(self, forward: Forward, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Logits ``[T, V]`` over random contexts, which are the same in every call."""
        cache = KVCache(self._geometries, self.num_blocks, self._rows.block_size, dtype, device)
        self.fill(cache)
        return forward(self.batch(device), cache)

    def batch(self, device: torch.device) -> Batch:
        """The rows, with logits of all."""
        return self._rows.batch(device)

    def fill(self, cache: KVCache) -> None:
        """Fill the blocks that the rows read, the first ones of a cache, with random keys and values."""
        generator = torch.Generator().manual_seed(_SEED)
        for store in (*cache.keys, *cache.values):
            store[: self.num_blocks].copy_(torch.randn(self.num_blocks, *store.shape[1:], generator=generator))


class FarProof:
    """Both proofs for one model, before another decoder takes its weights."""

    def __init__(
        self,
        loaded: LoadedModel,
        recorded: RecordingKernel,
        mask_windows: Sequence[int | None],
        block_size: int,
        kv_dtype: torch.dtype,
    ) -> None:
        """Run the first proof, and plain attention's part of the second. Raises ``ModelNotSupported``."""
        self._dtype, self._device, self._kv_dtype = loaded.dtype, loaded.device, kv_dtype
        num_positions, vocab_size = loaded.max_model_len, loaded.vocab_size
        config = loaded.model.config.get_text_config(decoder=True)
        at = switches(config, num_positions)
        plain = RaggedModel(loaded.model, GatherAttention(), mask_windows)
        with refusing(config.model_type):
            places = FarPlaces(at, vocab_size, block_size, self._device)
            self._routes = Routes(loaded.model)
            error = places.difference(plain.at_positions, recorded.geometries, self._dtype, self._routes)
            if not error <= tolerance(self._dtype):
                remedy = f"; set max_model_len to {at[0]} or less if it begins there" if len(at) > 1 else ""
                raise ModelNotSupported(
                    config.model_type,
                    f"its logits at a position depend on the rest of the batch, by {error:.2g} of their spread{remedy}",
                )
            self._rows = LongRows(recorded.options, recorded.geometries, num_positions, vocab_size, block_size)
            with self._routes.recording(self._rows.keys):
                self._wanted = self._rows.logits(plain, kv_dtype, self._device)

    def error(self, step_model: StepModel) -> float:
        """Difference of ``step_model`` from plain attention on long rows, as ``FarPlaces.difference``."""
        with self._routes.following(self._rows.keys):
            found = self._rows.logits(step_model, self._kv_dtype, self._device)
        return _difference(found, self._wanted)


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    allowed, found, wanted = wanted > FORBIDDEN, found.double(), wanted.double()
    count = allowed.sum()
    apart = torch.where(allowed, found - wanted, 0.0).square().sum() / count
    mean = torch.where(allowed, wanted, 0.0).sum() / count
    spread = torch.where(allowed, wanted - mean, 0.0).square().sum() / (count - 1)
    return float(apart.sqrt() / spread.sqrt().clamp_min(1e-12))
