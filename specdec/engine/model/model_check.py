"""Checks at load that a model runs correctly through the paged cache, or says why not.

Most incompatibilities are silent: the model runs, but its logits are wrong. So configs and class names are not trusted.
The checks, cheapest first:

    1. the config: encoder-decoder, recurrent layers that are not served, no text
    2. the attention implementation, once switched
    3. the attention calls of a forward pass: a constant number, with the engine's context, with each layer's declared
       mask (``declared_masks.py``), and without unknown keywords; and the calls of recurrences, likewise
    4. logits: chunked prefill, mixed batches, decoding and a tree, paged against dense (``probe.py``); and the same
       with every window and position-dependent scale moved to a few tokens (``switches.py``)
    5. faults that short sequences hide: modules that number rows, distant positions in one batch, and the serving
       kernels at full length (``proofs/``)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from specdec.engine.attention.paged import AttentionError
from specdec.engine.checkpoints.folder import read_json
from specdec.engine.checkpoints.wrappers import own_class
from specdec.engine.errors import EngineError, ModelLoadError, ModelNotSupported
from specdec.engine.model.skipping import NoAttention
from specdec.engine.model.switches import rope_parameter_sets
from specdec.engine.recurrent.layers import RecurrenceError, has_served_recurrence
from specdec.engine.settings import EngineSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.engine.attention.kv_cache import LayerGeometry
    from specdec.engine.states.memory import CellShape

_FAULTS = (ValueError, OSError, LookupError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)
"""Errors of transformers over a config with missing or odd values."""
_MOST_REASON = 300  # characters of transformers' errors
_PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
_STATELESS_LAYER_TYPES = frozenset({"mlp", "moe"})
_MOST = {
    "num_hidden_layers": 4096,
    "max_position_embeddings": 2**28,
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**16,
    "num_local_experts": 2**14,
    "num_experts": 2**14,
    "n_routed_experts": 2**14,
}
"""Largest sizes of a config, above any known model: a larger one would be allocated before it fails."""
_LEAST = {"max_position_embeddings": -1, "vocab_size": 1, "hidden_size": 1}
"""Smallest sizes, other than 0. -1 positions: XLNet has no limit."""
_RECURRENT_HINTS = (
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "conv_kernel",
    "rescale_every",
    "lru_width",
)


def read_config(directory: Path, settings: EngineSettings) -> PreTrainedConfig:
    """The config of a model's folder. Raises ``ModelLoadError``, and ``ModelNotSupported`` for what is never served."""
    written = read_json(directory / "config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=settings.trust_remote_code)
    except _FAULTS as error:
        kind = written.get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING and not settings.trust_remote_code:
            own_code = "set trust_remote_code if you trust its own code, or " if "auto_map" in written else ""
            raise ModelLoadError(
                f"model: {settings.model} is of model_type {kind}, which transformers {transformers.__version__} does "
                f"not know; {own_code}install a transformers that knows it"
            ) from error
        dtype = written.get("dtype") or written.get("torch_dtype")
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ModelLoadError(
                f"model: {settings.model} has dtype {dtype} in its config.json, which torch does not know; write "
                "bfloat16, float16 or float32"
            ) from error
        raise ModelLoadError(f"model: {settings.model} has no usable config.json: {told(error)}") from error
    check_config(config)
    own_class(config)  # raises if there is none
    return config


def told(error: Exception, config: PreTrainedConfig | None = None) -> str:
    """An error of transformers as one line."""
    if config is not None and isinstance(error, KeyError):  # it has the key alone
        ropes = rope_parameter_sets(config.get_text_config(decoder=True))
        if error.args[0] in [rope.get("rope_type") for rope in ropes]:
            return f"it does not know the rope_type {error}"
    return " ".join(str(error).split())[:_MOST_REASON]


def check_config(config: PreTrainedConfig) -> None:
    """Refuse unsupported configs, also of a wrapper's text model. Raises ``ModelNotSupported``.

    Call it before weights are read, and again with the loaded model's config.
    """
    text = config.get_text_config(decoder=True)
    for one in (config,) if text is config else (config, text):
        _check_one(one)
    if getattr(text, "vocab_size", None) is None:
        raise ModelNotSupported(config.model_type, "its config has no vocab_size: it generates no text")


def check_place(config: PreTrainedConfig, device_type: str, num_ranks: int) -> None:
    """Refuse recurrent layers on GPUs and on several ranks. Raises ``ModelNotSupported``."""
    if (device_type != "cpu" or num_ranks > 1) and _recurrent_parts(config.get_text_config(decoder=True)):
        raise ModelNotSupported(
            config.model_type, "its recurrent layers need a CPU and one rank: device cpu, tensor_parallel_size 1"
        )


def _recurrent_parts(config: PreTrainedConfig) -> str:
    """What tells that a config has recurrent layers; "" if nothing does."""
    types = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if foreign := sorted(types - _PAGED_LAYER_TYPES - _STATELESS_LAYER_TYPES):
        return f"layers of type {', '.join(foreign)} keep"
    hints = [hint for hint in _RECURRENT_HINTS if getattr(config, hint, None) is not None]
    return f"its config has {hints[0]}: it keeps" if hints and not types else ""


def _size(config: PreTrainedConfig, field: str) -> object:
    """A field of a config; None if it is missing or differs from layer to layer."""
    try:
        return getattr(config, field, None)
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return None


def _check_one(config: PreTrainedConfig) -> None:
    name = config.model_type
    for field, most in _MOST.items():
        size = _size(config, field)
        least = _LEAST.get(field, 0)
        if isinstance(size, int | float) and not least <= size <= most:
            raise ModelNotSupported(name, f"its config's {field} is {size}; sizes from {least} to {most} are supported")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(name, "it is an encoder-decoder model; only decoder-only models are paged")
    recurrent = _recurrent_parts(config)
    types = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    is_served = types <= _PAGED_LAYER_TYPES | _STATELESS_LAYER_TYPES | _STATE_LAYER_TYPES
    if recurrent and not (is_served and has_served_recurrence(config)):
        raise ModelNotSupported(name, f"{recurrent} state outside paged attention, and specdec has no such state")


def switch_attention(model: "PreTrainedModel", name: str) -> None:
    """Set the model's attention implementation and check that it is used. Raises ``ModelNotSupported``."""
    model_type = model.config.model_type
    reason = "its attention does not use transformers' attention interface"
    if not model._can_set_attn_implementation():
        raise ModelNotSupported(model_type, reason)
    try:
        model.set_attn_implementation(name)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelNotSupported(model_type, f"{reason} ({error})") from error
    if model.config._attn_implementation != name:
        raise ModelNotSupported(model_type, reason)


def check_attention_calls(
    model: "PreTrainedModel",
    passes: Sequence[Sequence["LayerGeometry"]],
    cells: Sequence[Sequence["CellShape"]] = ((),),
) -> None:
    """Check the calls of attention and of recurrences in passes of different shapes. Raises ``ModelNotSupported``."""
    model_type = model.config.model_type
    counts = sorted({len(calls) for calls in passes})
    text = model.config.get_text_config(decoder=True)
    num_layers = int(getattr(text, "num_hidden_layers", 0))
    num_layers -= sum(isinstance(module, NoAttention) for module in model.modules())
    if any(list(calls) != list(cells[0]) for calls in cells):
        raise ModelNotSupported(model_type, "the calls of its recurrent layers vary with the input")
    if cells[0]:  # some layers do not attend; the logits decide
        num_layers = sum(kind in _PAGED_LAYER_TYPES for kind in getattr(text, "layer_types", None) or ())
    elif counts[0] == 0:
        raise ModelNotSupported(model_type, "its forward pass never calls the registered attention function")
    if len(counts) > 1:
        raise ModelNotSupported(model_type, f"its attention calls per pass vary with the input: {counts}")
    if counts[0] < num_layers:
        raise ModelNotSupported(
            model_type, f"only {counts[0]} of its {num_layers} layers call the registered attention function"
        )
    if any(list(calls) != list(passes[0]) for calls in passes):
        raise ModelNotSupported(model_type, "the sizes of its keys and values vary with the input")


@contextmanager
def refusing(model_type: str) -> Iterator[None]:
    """Turn errors of a model's forward pass on a ragged batch into ``ModelNotSupported``."""
    try:
        yield
    except EngineError:
        raise
    except (AttentionError, RecurrenceError) as error:
        raise ModelNotSupported(model_type, str(error)) from error
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelNotSupported(model_type, f"its forward pass fails on a ragged batch: {error}") from error
