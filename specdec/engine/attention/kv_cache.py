"""The paged KV cache: one pool of blocks per attention layer, addressed by physical slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.states.memory import StateMemory

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Sizes that one attention call stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    """A value is the first ``value_dim`` numbers of its key, and not stored apart."""

    @property
    def num_elements(self) -> int:
        """Numbers stored per token."""
        return self.num_kv_heads * (self.key_dim + (0 if self.values_in_keys else self.value_dim))


def stored_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Data type of keys and values by the setting and the model's data type."""
    return torch.float8_e4m3fn if kv_cache_dtype == "fp8" else dtype


class KVCache:
    """Keys and values of every layer. Block numbers are the same in all layers.

    Layer ``i`` is ``keys[i]`` ``[num_blocks, num_kv_heads, block_size, key_dim]`` and ``values[i]`` likewise. If all
    layers are alike, they are views of one tensor ``[layer, 2, block, kv head, slot, dim]``; values in keys are views
    of these. Physical slot ``s`` is offset ``s % block_size`` of block ``s // block_size``. Layers are numbered in the
    order of attention calls of a forward pass, which may differ from the module's index. ``states`` are those of
    recurrent layers.
    """

    def __init__(
        self,
        geometries: Sequence[LayerGeometry],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateMemory | None = None,
    ) -> None:
        self.states = states
        self.geometries = tuple(geometries)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._stores: list[torch.Tensor] = []  # each [n, num_blocks, num_kv_heads, block_size, dim]
        if not self.geometries:
            return
        first = self.geometries[0]
        is_uniform = all(g == first for g in self.geometries) and first.key_dim == first.value_dim
        if is_uniform and not first.values_in_keys:
            shape = (len(geometries), 2, num_blocks, first.num_kv_heads, block_size, first.key_dim)
            data = torch.zeros(shape, dtype=dtype, device=device)
            self.keys.extend(data[:, 0].unbind(0))
            self.values.extend(data[:, 1].unbind(0))
            self._stores.append(data.flatten(0, 1))
            return
        for geometry in self.geometries:
            shape_one = (num_blocks, geometry.num_kv_heads, block_size)
            keys = torch.zeros(*shape_one, geometry.key_dim, dtype=dtype, device=device)
            self.keys.append(keys)
            self._stores.append(keys.unsqueeze(0))
            if geometry.values_in_keys:
                self.values.append(keys[..., : geometry.value_dim])
                continue
            values = torch.zeros(*shape_one, geometry.value_dim, dtype=dtype, device=device)
            self.values.append(values)
            self._stores.append(values.unsqueeze(0))

    @property
    def num_layers(self) -> int:
        """Attention calls per forward pass."""
        return len(self.geometries)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache, with the states of recurrent layers."""
        of_states = 0 if self.states is None else self.states.num_bytes
        return of_states + sum(store.numel() * store.element_size() for store in self._stores)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, destination)`` in all layers, in order. Cost: one memcpy each."""
        for source, destination in pairs:
            for store in self._stores:
                store[:, destination].copy_(store[:, source])

    @torch.inference_mode()
    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy physical slots ``src[i] -> dst[i]`` in all layers, as if all were read before any is written.

        Cost: one asynchronous copy to the device, and one or two kernels per separately stored layer.
        """
        if not src:
            return
        sources, targets = torch.tensor([src, dst], dtype=torch.int64).to(self.device, non_blocking=True).unbind(0)
        source_block, source_offset = sources // self.block_size, sources % self.block_size
        target_block, target_offset = targets // self.block_size, targets % self.block_size
        for store in self._stores:
            store[:, target_block, :, target_offset] = store[:, source_block, :, source_offset]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values ``[T, num_kv_heads, dim]`` at physical slots ``[T]`` of one layer."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self.keys[layer][blocks, :, offsets] = self._stored(keys)
        if not self.geometries[layer].values_in_keys:
            self.values[layer][blocks, :, offsets] = self._stored(values)

    def _stored(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float8_e4m3fn:  # which has no infinity: larger numbers would become NaN
            numbers = numbers.clamp(-LARGEST_FP8, LARGEST_FP8)
        return numbers.to(self.dtype)
