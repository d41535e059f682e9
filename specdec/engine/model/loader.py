"""Loads a decoder-only transformers model: safetensors only, no repository code unless allowed."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from specdec.engine.checkpoints.files import (
    ModelIdentity,
    TokenizerFiles,
    config_digest,
    find_model_files,
    name_of,
    read_eos_token_ids,
    read_tokenizer,
    weights_digest,
)
from specdec.engine.checkpoints.folder import check_weights, read_json
from specdec.engine.checkpoints.formats import check_format
from specdec.engine.checkpoints.fp8_files import check_plain, fp8_config, read_fp8
from specdec.engine.checkpoints.rounding import quantize_linear_weights
from specdec.engine.checkpoints.wrappers import own_class, text_model, without_encoders
from specdec.engine.errors import ModelLoadError
from specdec.engine.model.device_choice import check_quantization, choose_device, choose_dtype
from specdec.engine.model.model_check import check_config, check_place, read_config, told
from specdec.engine.model.skipping import (
    LEAST_AGREEMENT,
    agreement,
    likeliest,
    remove_sublayers,
    sample_ids,
    too_different,
)
from specdec.engine.model.switches import longest_context, switch_off_limited
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.parallel.sharding import TensorParallelRefused, check_plan
from specdec.engine.settings import EngineSettings
from specdec.engine.sublayers import skipped_sublayers

_DUMMY_SEED = 0
_MOST_NAMED = 5
"""Weights that a message names."""
_AHEAD = "caching_allocator_warmup"
"""transformers' function that allocates the memory of all weights in one piece."""
_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, with its own modules and dense attention, and its files' metadata."""

    model: PreTrainedModel
    identity: ModelIdentity
    tokenizer: TokenizerFiles
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    """Number of the tokenizer's ids; the logits may have more columns."""
    num_logits: int
    num_parameters: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    checkpoint_format: str = ""
    """Format of quantized weights (``formats.format_of``); "" for plain ones."""

    def release_model(self) -> None:
        """Drop the modules, once another decoder has the weights."""
        self.model = None  # type: ignore[assignment]


def check_tensor_parallel(settings: EngineSettings, num_nodes: int = 1) -> str:
    """Check that the model and the machine, one of ``num_nodes``, allow ``tensor_parallel_size``. Returns the device of
    the machine's first rank.

    Raises ``TensorParallelRefused``, and the errors of ``load_model`` for a config. Reads no weights.
    """
    size = settings.tensor_parallel_size
    directory, _ = find_model_files(settings.model, settings.revision)
    config = read_config(directory, settings)
    device = choose_device(settings.device)
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and num_gpus < (device.index or 0) + size // num_nodes:
        raise TensorParallelRefused(size, f"it needs one GPU per rank from {device} on, and torch sees {num_gpus}")
    if device.type == "cpu" and num_gpus:
        raise TensorParallelRefused(size, "ranks on the CPU must not see GPUs: set CUDA_VISIBLE_DEVICES=-1")
    check_place(config, device.type, size)
    if own_class(config) is not None:
        raise TensorParallelRefused(size, f"ranks are not possible for {config.model_type}, which wraps its text model")
    check_plan(config, size, settings.trust_remote_code)
    return str(device)


def load_model(
    settings: EngineSettings,
    group: RankGroup | None = None,
    check: Callable[[PreTrainedConfig], None] = lambda config: None,
) -> LoadedModel:
    """Load the model of the settings, or this rank's shard, which keeps transformers' wrappers until ``shard_model``.

    ``check`` sees the config before weights are read, and may raise.

    Raises ``ModelNotSupported`` for unsupported configs and ``ModelLoadError`` for other failures.
    """
    disable_progress_bar()  # it would spoil the service's log
    directory, revision = find_model_files(settings.model, settings.revision)
    config = read_config(directory, settings)
    device = choose_device(settings.device) if group is None else group.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton, streams and graphs use the current device
    dtype = choose_dtype(settings.dtype, device, config)
    check_quantization(settings, dtype, device)
    check_place(config, device.type, settings.tensor_parallel_size)
    config, block = fp8_config(config) or (config, None)
    if block is not None and settings.tensor_parallel_size > 1:
        raise ModelLoadError(f"tensor_parallel_size: {settings.model} has weights of 8 bits; set 1")
    checkpoint_format = check_format(config, settings, device)
    max_model_len = longest_context(settings.max_model_len, config)
    check(config)
    if settings.load_format == "dummy":
        place = "" if device.type == "cpu" else f"{device.type}-"  # other generators give other numbers
        digest = f"random-{_DUMMY_SEED}-{place}{config_digest(config.to_dict())}"
        model = random_model(config, dtype, device, settings.trust_remote_code, group)
    else:
        check_weights(directory)
        if block is None and not checkpoint_format:
            check_plain(directory)
        digest = weights_digest(directory)
        weights = None if block is None else read_fp8(directory, block, dtype)
        model = _read_model(directory, config, settings, dtype, device, group, weights)
    check_config(model.config)
    switch_off_limited(model)
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    num_logits = int(
        config.get_text_config(decoder=True).vocab_size if weight is None or checkpoint_format else weight.shape[0]
    )
    tokenizer = read_tokenizer(directory)
    if not checkpoint_format:  # quantized weights are in place, and may refuse to move
        model.to(device)  # type: ignore[arg-type]
    model.eval().requires_grad_(False)
    if settings.skips_sublayers:
        digest += f"-{_skip(model, settings, tokenizer)}"
    _tell_non_finite(model)
    num_parameters = int(model.num_parameters())  # of the whole model, also for a shard
    quantize_linear_weights(model, settings.weight_quantization)
    identity = ModelIdentity(
        name=name_of(settings.model, directory),
        revision=revision,
        weights_digest=digest,
        architecture=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        tokenizer_digest=tokenizer.digest,
        config_digest=config_digest(read_json(directory / "config.json")),
    )
    text = model.config.get_text_config(decoder=True)
    named_eos = getattr(config, "eos_token_id", None) or getattr(text, "eos_token_id", None)
    vocab_size = min(num_logits, tokenizer.vocab_size or num_logits)
    return LoadedModel(
        model=model,
        identity=identity,
        tokenizer=tokenizer,
        eos_token_ids=read_eos_token_ids(directory, named_eos, tokenizer, vocab_size),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_logits=num_logits,
        num_parameters=num_parameters,
        num_layers=int(getattr(text, "num_hidden_layers", 0)),
        hidden_size=int(getattr(text, "hidden_size", 0)),
        dtype=dtype,
        device=device,
        checkpoint_format=checkpoint_format,
    )


def _skip(model: PreTrainedModel, settings: EngineSettings, tokenizer: TokenizerFiles) -> str:
    """Remove the sublayers that the settings name. Returns a short digest of them.

    Raises ``ModelLoadError`` for missing layers, and if the rest hardly agrees with the whole model.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        skipped = skipped_sublayers(
            int(config.num_hidden_layers),
            settings.exit_layer,
            settings.skip_attention_layers,
            settings.skip_mlp_layers,
        )
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    ids = [] if settings.load_format == "dummy" else sample_ids(tokenizer.tokenizer_json, int(config.vocab_size))
    whole = likeliest(model, ids) if ids else None
    remove_sublayers(model, skipped)
    if whole is not None:
        share = agreement(likeliest(model, ids), whole)
        if share < LEAST_AGREEMENT:
            raise ModelLoadError(too_different(skipped, share))
        _logger.info("sublayers are skipped", extra={"skipped": str(skipped), "agreement": round(share, 3)})
    return hashlib.blake2b(str(skipped).encode(), digest_size=4).hexdigest()


def _tell_non_finite(model: PreTrainedModel) -> None:
    """Log the weights in host memory (of a shard: its own parts) that hold NaN or infinity: a request that meets them
    fails. Cost: one pass over these weights.
    """
    broken = []
    for name, weight in model.named_parameters():
        is_read = weight.dtype.is_floating_point and weight.numel() and weight.element_size() > 1
        if not (is_read and weight.device.type == "cpu"):
            continue
        own = weight.detach()
        if isinstance(own, DTensor):
            own = own.to_local()  # over all ranks it would take six collectives, of which gloo's minimum loses NaN
            if not own.numel():
                continue
        least, most = own.aminmax()
        if not (torch.isfinite(least) and torch.isfinite(most)):
            broken.append(name)
    if broken:
        note = "requests that meet them end with NON_FINITE_LOGITS: replace the checkpoint"
        _logger.error("%d weights hold NaN or infinity: %s; %s", len(broken), ", ".join(broken[:_MOST_NAMED]), note)


def _read_model(
    directory: Path,
    config: PreTrainedConfig,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
    weights: dict[str, torch.Tensor] | None,
) -> PreTrainedModel:
    """``weights``: the weights of the folder, if transformers does not read them."""
    placed: dict[str, Any] = {}
    if group is not None:
        placed["distributed_config"] = DistributedConfig(tp_size=group.size)
    elif device.type == "cuda":
        placed["device_map"] = {"": device}  # tensor by tensor, as the host may not hold the whole model
    try:
        with _allocated_one_by_one(), without_encoders(config):
            own: Any = own_class(config)
            kind: Any = AutoModelForCausalLM if own is None else own
            given: dict[str, Any] = {} if own is None else {"config": config}
            if weights is not None:
                kind, given = own or _causal_class(config), {"config": config, "state_dict": weights}
            read: Any = kind.from_pretrained(
                directory if weights is None else None,
                **given,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name
                **placed,
            )
    except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:  # a format's package may be missing
        raise ModelLoadError(f"model: {settings.model} could not be loaded: {told(error, config)}") from error
    model: PreTrainedModel = read[0]
    for name, stored, wanted in sorted(read[1]["mismatched_keys"]):
        raise ModelLoadError(
            f"model: {settings.model} has {name} of shape {list(stored)}, and its config.json means {list(wanted)}; "
            "they belong to different models"
        )
    missing = sorted({name for name, _ in model.named_parameters()}.intersection(read[1]["missing_keys"]))
    if missing:  # transformers fills them with random numbers
        raise ModelLoadError(f"model: {settings.model} lacks {len(missing)} weights, such as {missing[0]}")
    return text_model(model)


def _causal_class(config: PreTrainedConfig) -> Any:
    """The class of a config's causal language model, in transformers' own code."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise ModelLoadError(
            f"model: weights of 8 bits are read into transformers' own classes, not {config.model_type}"
        )
    return found[0] if isinstance(found, tuple) else found


def random_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    group: RankGroup | None = None,
) -> PreTrainedModel:
    """A model with random weights, generated on the device (on a GPU in a hundredth of the CPU's time).

    The weights do not depend on the number of ranks, so that each rank first generates the whole model. Generators of
    other devices are not saved, which would start a context on every GPU.

    Raises ``ModelLoadError`` if transformers lacks the model.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(_DUMMY_SEED)
        try:
            with without_encoders(config):
                own: Any = own_class(config)
                model: PreTrainedModel = (
                    AutoModelForCausalLM.from_config(
                        config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
                    )
                    if own is None
                    else own._from_config(config, dtype=dtype, attn_implementation="eager")
                )
        except (ValueError, KeyError) as error:
            raise ModelLoadError(f"model: no causal language model for {config.model_type}: {error}") from error
    return text_model(model) if group is None else _distributed(model, group)


def _distributed(model: PreTrainedModel, group: RankGroup) -> PreTrainedModel:
    try:
        from transformers.distributed.utils import initialize_distributed_mesh
    except ImportError as error:
        raise ModelLoadError(
            f"load_format: dummy with several ranks needs transformers 5.23, not {transformers.__version__}"
        ) from error
    distributed = DistributedConfig(tp_size=group.size)
    _, meshes = initialize_distributed_mesh(distributed)
    head = model.get_output_embeddings()
    if head is not None:  # transformers does not split a tied parameter
        head.weight = torch.nn.Parameter(head.weight.detach(), requires_grad=False)
    model = model.maybe_distribute_model(model, distributed, meshes)
    model.tie_weights()
    return model


@contextlib.contextmanager
def _allocated_one_by_one() -> Iterator[None]:
    """Make transformers allocate each weight on its own, so that a freed weight's memory can be reused.

    transformers allocates all weights in one piece first, which saves some hundred allocations of a millisecond. Our
    decoder joins weights, and the holes that remain in that piece can be neither freed nor reused: 16 of 60 GiB in a
    model of torch's allocator (weights in the order of four loading threads).
    """
    ahead = getattr(modeling_utils, _AHEAD, None)
    if ahead is None:
        yield
        return
    setattr(modeling_utils, _AHEAD, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        setattr(modeling_utils, _AHEAD, ahead)
