"""The engine process of a target behind an endpoint: proves that the endpoint can verify, then serves."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from prometheus_client import REGISTRY

from specdec import __version__
from specdec.config import TargetSettings
from specdec.config.endpoint_options import ApiTargetOptions
from specdec.config.generation_config import sampling_defaults
from specdec.drafting.endpoints.calls import ApiFault, ApiRefused, Endpoint, read_endpoint
from specdec.engine.checkpoints.files import TokenizerFiles, find_model_files, read_eos_token_ids, read_tokenizer
from specdec.engine.errors import ModelLoadError
from specdec.replica.bridge.frames import EnginePort, FrameKind
from specdec.replica.worker.entry import make_host, report_fatal, serve
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.role import Wire
from specdec.target_service.api.calls import Block
from specdec.target_service.api.role import ApiTarget
from specdec.target_service.api.session import ApiSession
from specdec.telemetry import TargetMetrics
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.sampling_params import SamplingParams

_PROBE = (5, 6, 7, 8)
_MISSING = {
    "no_token_ids": "it tells no token ids (return_token_ids)",
    "no_prompt_logprobs": "it does not answer prompt_logprobs; api.fields echo needs echo with logprobs",
    "no_rank": "its prompt_logprobs have no ranks",
    "no_echo": "it does not answer echo with logprobs, named by ids (return_tokens_as_token_ids)",
    "status_4xx": "it refuses such a call: the key, the model's name, or fields that it does not know",
}
_RETRY = Backoff(0.5, 5.0)
_PIECE_BYTES = 1 << 20


def run_api(port: EnginePort, settings: TargetSettings, options: ApiTargetOptions, wire: Wire) -> None:
    """Verify until the servicer closes the port or sends stop; an unusable endpoint is reported to it as fatal."""
    try:
        endpoint = read_endpoint(options)
        directory, _ = find_model_files(settings.model, settings.revision)
        tokenizer = read_tokenizer(directory)
        identity = _identity(settings, options, endpoint, directory, tokenizer)
        _prove(endpoint, options, identity.vocab_size, settings.load_timeout_s)
    except (ApiRefused, ModelLoadError, OSError, ValueError) as error:
        report_fatal(port, f"api: {error}")
        return
    _send_tokenizer(tokenizer, port)
    info = pb.GetReplicaInfoResponse(
        identity=identity, version=__version__, max_message_bytes=settings.max_message_bytes
    )
    host: SessionHost[ApiSession] = make_host(port, settings, wire, info)
    role = ApiTarget(host, endpoint, options, settings, identity, TargetMetrics(REGISTRY))
    serve(port, settings, wire, info, host, role)


def _identity(
    settings: TargetSettings, options: ApiTargetOptions, endpoint: Endpoint, directory: Path, tokenizer: TokenizerFiles
) -> pb.ModelIdentity:
    """Identity of the endpoint's model. Its address stands for the weights and the numerics, which are not known."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if not tokenizer.vocab_size:
        raise ModelLoadError(f"{settings.model} has no tokenizer.json")
    place = f"{endpoint.host}:{endpoint.port}{endpoint.path}#{options.model}"
    longest = settings.max_model_len or config.get("max_position_embeddings")
    if not isinstance(longest, int) or longest < 2:
        raise ModelLoadError("max_model_len: the config does not say how long the context is; set it")
    vocab_size = tokenizer.vocab_size
    if isinstance(named_size := config.get("vocab_size"), int):
        vocab_size = min(vocab_size, named_size)
    try:
        defaults = sampling_defaults(settings.generation_config, settings.override_generation_config, directory)
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    return pb.ModelIdentity(
        name=settings.served_name,
        architecture="api",
        weights_digest=f"api-{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}",
        tokenizer_digest=tokenizer.digest,
        numerics_id=f"api/{place}",
        row_invariant=False,
        vocab_size=vocab_size,
        max_model_len=longest,
        eos_token_ids=read_eos_token_ids(directory, config.get("eos_token_id"), tokenizer, vocab_size),
        device="none",
        sampling_defaults=defaults,
    )


def _prove(endpoint: Endpoint, options: ApiTargetOptions, vocab_size: int, patience_s: float) -> None:
    """Verify a block of three tokens with an endpoint, with retries for `patience_s` seconds.

    Raises ApiRefused: the endpoint cannot verify a block, or has not answered in this time.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    ends_at_s = time.monotonic() + patience_s
    probe = [token_id % vocab_size for token_id in _PROBE]
    for attempt in range(1, 2**31):
        block = Block(endpoint, probe[:1], probe[1:], params, options.fields, time.monotonic())
        block.join()
        try:
            block.tokens(vocab_size)
            return
        except ApiFault as fault:
            wait_s = _RETRY.wait_s(attempt)
            if fault.kind in _MISSING or time.monotonic() + wait_s > ends_at_s:
                said = _MISSING.get(fault.kind, f"it does not answer as it should: {fault.kind}")
                raise ApiRefused(f"the endpoint cannot verify a block in one call: {said}") from None
        time.sleep(wait_s)


def _send_tokenizer(tokenizer: TokenizerFiles, port: EnginePort) -> None:
    content = tokenizer.tokenizer_json.encode()
    config = json.dumps(tokenizer.config, default=str)
    for start in range(0, len(content), _PIECE_BYTES):
        piece = pb.GetTokenizerResponse(
            tokenizer_json=content[start : start + _PIECE_BYTES], tokenizer_config="" if start else config
        )
        port.send(FrameKind.TOKENIZER, payload=piece.SerializeToString())
