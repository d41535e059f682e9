"""All heads by name: their capabilities, and how to make one from options and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import structlog

from specdec.config.drafter_options import HeadOptions, MedusaOptions, MtpOptions
from specdec.drafting.heads.cache import HeadCache
from specdec.drafting.heads.checkpoint import HeadFiles, HeadRefused, read_head_files
from specdec.drafting.heads.config import HeadConfig, read_config
from specdec.drafting.heads.methods import dflash, dspark, eagle, eagle3, medusa, mtp, peagle
from specdec.drafting.heads.parts import head_sizes
from specdec.drafting.heads.serial import SerialHead
from specdec.drafting.heads.session import Head
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary
from specdec.drafting.interface import Capabilities
from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.tap import FINAL

CAPABILITIES: Mapping[str, Capabilities] = MappingProxyType(
    {
        "medusa": medusa.CAPABILITIES,
        "eagle": eagle.CAPABILITIES,
        "eagle3": eagle3.CAPABILITIES,
        "peagle": peagle.CAPABILITIES,
        "dflash": dflash.CAPABILITIES,
        "dspark": dspark.CAPABILITIES,
        "mtp": mtp.CAPABILITIES,
    }
)
"""Capabilities by method. No head gives a distribution: in rejection mode its tokens are point masses."""


def make_head(options: HeadOptions, target: HeadTarget) -> Head:
    """Load the head of these options and check that it fits.

    Raises HeadRefused: the files are no head, or do not fit the target. TapRefused: the target does not provide the
    hidden states that the head reads.
    """
    head = load_head(options, target)
    target.runner.check_tap(head.layer_ids)
    return head


def load_head(options: HeadOptions, target: HeadTarget) -> Head:
    """Load the head without checking the tap, so that it may run in another thread during the target's passes.

    Raises HeadRefused.
    """
    try:
        if isinstance(options, MtpOptions):
            return _make_mtp(options, target)
        return _make(options, read_head_files(options.model), target)
    except HeadRefused as error:
        raise HeadRefused(f"drafters: {options.method}: {error}") from error


def _make(options: HeadOptions, files: HeadFiles, target: HeadTarget) -> Head:
    if isinstance(options, MedusaOptions):
        return medusa.load_medusa(files, options, target)
    config = read_config(files.config)
    if config.method and config.method != options.method:
        raise HeadRefused(f"{files.directory} holds a head of method {config.method}")
    depth, top_k = options.num_speculative_tokens or config.num_speculative_tokens, options.speculative_eagle_topk
    if options.method == "eagle":
        model, vocabulary = eagle.load_eagle(files, config, target)
        return _serial(options, eagle.CAPABILITIES, (FINAL,), model, config, vocabulary, target)
    layer_ids = config.taps(options.layer_ids, target.runner.num_layers)
    if options.method == "eagle3":
        eagle3_model, vocabulary = eagle3.load_eagle3(files, config, layer_ids, target)
        return _serial(options, eagle3.CAPABILITIES, layer_ids, eagle3_model, config, vocabulary, target)
    if options.method == "peagle":
        masked, vocabulary, mask_hidden, token = peagle.load_peagle(files, config, layer_ids, target)
        cache = _cache(config, target)
        depth = depth or eagle3.FIRST_DEPTH
        return peagle.PEagle(layer_ids, masked, mask_hidden, token, target, cache, vocabulary, depth=depth, top_k=top_k)
    is_spark = options.method == "dspark"
    own = files
    if is_spark:
        plain = {name: value for name, value in files.tensors.items() if not _is_spark(name)}
        own = replace(files, tensors=plain)
    block, vocabulary, mask = dflash.load_dflash(own, config, layer_ids, target)
    kind = dspark.DSpark if is_spark else dflash.DFlash
    capabilities, cache = CAPABILITIES[options.method], _cache(config, target)
    head = kind(
        options.method,
        capabilities,
        config,
        layer_ids,
        block,
        mask,
        target,
        cache,
        vocabulary,
        depth=depth,
        top_k=top_k,
    )
    if isinstance(head, dspark.DSpark):
        head.spark = dspark.load_spark(files, config, vocabulary.draft_size, target)
    return head


def _make_mtp(options: MtpOptions, target: HeadTarget) -> SerialHead:
    model, layers, attention = mtp.load_mtp(options.model, target)
    return SerialHead(
        options.method,
        mtp.CAPABILITIES,
        (FINAL,),
        model,
        target,
        _cache_of(layers, attention, target),
        DraftVocabulary(None, target.vocab_size, target.vocab_size),
        depth=options.num_speculative_tokens or mtp.FIRST_DEPTH,
        top_k=options.speculative_eagle_topk,
        num_nodes=options.num_draft_tokens,
    )


def _is_spark(name: str) -> bool:
    return name.removeprefix("model.").startswith(dspark.PREFIXES)


def _serial(
    options: HeadOptions,
    capabilities: Capabilities,
    layer_ids: tuple[int, ...],
    model: eagle.EagleModel | eagle3.Eagle3Model,
    config: HeadConfig,
    vocabulary: DraftVocabulary,
    target: HeadTarget,
) -> SerialHead:
    return SerialHead(
        options.method,
        capabilities,
        layer_ids,
        model,
        target,
        _cache(config, target),
        vocabulary,
        depth=options.num_speculative_tokens or config.num_speculative_tokens or eagle3.FIRST_DEPTH,
        top_k=options.speculative_eagle_topk,
        num_nodes=options.num_draft_tokens,
    )


def _cache(config: HeadConfig, target: HeadTarget) -> HeadCache:
    _, num_kv_heads, head_dim = head_sizes(config.layers)
    geometry = LayerGeometry(num_kv_heads, head_dim, head_dim)
    return _cache_of([geometry] * config.layers.num_hidden_layers, AttentionOptions(head_dim**-0.5), target)


def _cache_of(layers: Sequence[LayerGeometry], options: AttentionOptions, target: HeadTarget) -> HeadCache:
    runner = target.runner
    cache = HeadCache(
        layers,
        options,
        target.engine.block_pool.num_blocks,
        runner.block_size,
        runner.dtype,
        runner.device,
        target.attention,
    )
    structlog.get_logger("specdec.drafting.heads").info("head_cache", num_bytes=cache.num_bytes)
    return cache
