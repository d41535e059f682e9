"""Load a model, build its engine, and run a role over it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from specdec import __version__
from specdec.config import DraftSettings, TargetSettings
from specdec.config.generation_config import sampling_defaults
from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.constraints.grammar.source import CONSTRAINTS_ID
from specdec.engine.block_pool import BlockPool
from specdec.engine.checkpoints.files import find_model_files, parallel_mask, pinned, read_tokenizer
from specdec.engine.checkpoints.tokenizer_conversion import require_tokenizer
from specdec.engine.cuda.passes import CAPTURE_BYTES
from specdec.engine.drawing.native import DrawingDecoder
from specdec.engine.drawing.rows import Drawing
from specdec.engine.engine import Engine
from specdec.engine.errors import EngineError, ModelLoadError
from specdec.engine.leading_runner import LeadingRunner
from specdec.engine.model.device_choice import is_on_gpu
from specdec.engine.model.kv_budget import Beside
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.scheduler import Scheduler
from specdec.engine.settings import EngineSettings
from specdec.replica.bridge.frames import EnginePort, FrameKind
from specdec.replica.ranks.leading import Ranks, lead_ranks
from specdec.replica.worker.entry import make_host, report_fatal, serve
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.role import Role, Wire
from specdec.replica.worker.sessions import SessionT
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import most_entry_bytes, opening_bytes

SettingsT = TypeVar("SettingsT", TargetSettings, DraftSettings)
_TOKENIZER_CHUNK_BYTES = 1 << 20
_MOST_STEP_S = 2.0
"""Seconds of a step, at most: progress is reported between steps, and coordinators move silent sessions after twice
this."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to step, its sampler, and its model's info."""

    engine: Engine
    sampler: Sampler
    info: pb.GetReplicaInfoResponse
    full_step_s: float = 0.0
    """Upper estimate of a full step's time, extrapolated from the warm-up's few rows: the cost of a row mostly falls
    with their number."""
    drawing: Drawing | None = None
    """Drafts several tokens per call with the sampler's results; None if not available."""
    grammars: GrammarCompiler | None = None
    """Compiles constraints; None if the tokenizer allows none."""
    model: ModelRunner | None = None
    """Runs the model in this process; None if no model runs here."""
    mask_token_id: int | None = None
    """Mask token of a draft that predicts several tokens in one pass; None otherwise."""
    awaited_bytes: int = 0
    """Device memory that heads, which are loaded later, and their captures will take."""

    @property
    def row_edges(self) -> tuple[int, ...]:
        """Row counts, rising, to which steps are padded: rows up to the next count are free. Empty without captures;
        with heads, captures come after this object is built."""
        return () if self.model is None else self.model.row_edges


def build_engine(
    settings: TargetSettings | DraftSettings,
    port: EnginePort | None = None,
    ranks: Ranks | None = None,
    others_bytes: int = 0,
    heads: Beside | None = None,
) -> BuiltEngine:
    """Load, check and warm up the model, together with the other ranks if there are any; send its tokenizer to `port`.

    On a GPU the KV cache leaves `others_bytes` of memory to other parts of this process, and the memory of `heads`,
    which are loaded later and read hidden states; None: there will be none.

    Raises:
        ModelNotSupported, ModelLoadError: the model cannot be used; the message is for people.
        EngineError: no message could open a session that fills the context.
    """
    if port is not None and isinstance(settings, TargetSettings):  # its coordinator needs the tokenizer
        folder, _ = find_model_files(settings.model, settings.revision)
        require_tokenizer(folder, read_tokenizer(folder).tokenizer_json)
    beside = Beside(others_bytes) if heads is None else replace(heads, num_bytes=heads.num_bytes + others_bytes)
    runner = ModelRunner.load(settings, None if ranks is None else ranks.join(), beside)
    # With heads, steps return hidden states: captures wait until it is known which.
    row_s = runner.warmup(captures=ranks is not None or heads is None)
    if ranks is not None:
        ranks.confirm(runner.numerics_id)
    max_batch_tokens = most_rows(settings, row_s, runner.device.type)
    salt = f"{runner.identity.weights_digest}/{runner.numerics_id}".encode()
    pool = BlockPool(runner.num_blocks, runner.block_size, salt)
    # A sequence that fills the whole cache can still run; a longer one never could.
    max_model_len = min(runner.max_model_len, runner.num_blocks * runner.block_size)
    scheduler = Scheduler(pool, max_batch_tokens, settings.max_batch_seqs, max_model_len, runner.session_states())
    sampler = Sampler(runner.vocab_size, runner.device, native=runner.native_sampling)
    if runner.has_device_kernels:
        sampler.compile()
    grammars = _grammars(runner)
    identity = pb.ModelIdentity(
        name=settings.served_name,
        revision=runner.identity.revision,
        architecture=runner.identity.architecture,
        weights_digest=runner.identity.weights_digest,
        tokenizer_digest=runner.identity.tokenizer_digest,
        config_digest=runner.identity.config_digest,
        numerics_id=runner.numerics_id,
        row_invariant=runner.row_invariant,
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=runner.eos_token_ids,
        num_parameters=runner.num_parameters,
        dtype=runner.identity.dtype,
        device=str(runner.device),
        constraints_id="" if grammars is None else CONSTRAINTS_ID,
        sampling_defaults=_sampling_defaults(settings) if isinstance(settings, TargetSettings) else None,
    )
    check_openings(identity, settings.max_message_bytes)
    if port is not None:
        _send_tokenizer(runner, port)
    info = pb.GetReplicaInfoResponse(
        identity=identity, version=__version__, max_message_bytes=settings.max_message_bytes
    )
    mask_token_id = None
    if isinstance(settings, DraftSettings):
        mask_token_id = parallel_mask(settings.model, settings.revision, settings.parallel_drafting, runner.num_logits)
    steps = runner if ranks is None else LeadingRunner(runner, ranks.connections, partial(ranks.pulse.mark_rank, 0))
    drawing = _drawing(runner, sampler) if ranks is None and mask_token_id is None else None
    is_launched = isinstance(settings, TargetSettings) and is_on_gpu(runner.device)
    engine = Engine(steps, pool, scheduler, steps.launch if is_launched else None, runner)
    verify_s = row_s * max_batch_tokens
    return BuiltEngine(
        engine,
        sampler,
        info,
        verify_s,
        drawing,
        grammars,
        runner,
        mask_token_id,
        awaited_bytes=0 if heads is None else _awaited_bytes(runner, heads),
    )


def _awaited_bytes(runner: ModelRunner, heads: Beside) -> int:
    weights = heads.weight_bytes(runner.num_logits, runner.hidden_size, runner.dtype)
    return weights + heads.cache_bytes(runner.num_blocks * runner.block_size, runner.dtype) + CAPTURE_BYTES


def _drawing(runner: ModelRunner, sampler: Sampler) -> Drawing | None:
    if sampler.is_native and runner.fused is not None:
        return DrawingDecoder(*runner.fused, runner.vocab_size)
    if runner.replays is None:
        return None
    from specdec.engine.drawing.device import DeviceDrawing  # a CPU has no triton

    return DeviceDrawing(runner.replays, runner.max_model_len, sampler)


def _grammars(runner: ModelRunner) -> GrammarCompiler | None:
    try:
        return GrammarCompiler(runner.tokenizer_json, runner.vocab_size, tuple(runner.eos_token_ids))
    except ValueError as error:
        structlog.get_logger("specdec.replica.worker").info("no_constraints", error=str(error))
        return None


def most_rows(settings: EngineSettings, row_s: float, device_type: str) -> int:
    """Rows of a step: `max_batch_tokens`, or on slow machines as many as take two seconds.

    Each of `max_batch_seqs` sessions gets one row in any case.
    """
    most = settings.rows_of_step(device_type)
    if row_s * most <= _MOST_STEP_S:
        return most
    return min(most, max(settings.max_batch_seqs, int(_MOST_STEP_S / row_s)))


def check_openings(identity: pb.ModelIdentity, max_message_bytes: int) -> None:
    """Raise EngineError if no message could open a session that fills the context."""
    needed = opening_bytes(identity.max_model_len, identity.vocab_size)
    if needed > most_entry_bytes(max_message_bytes):
        raise EngineError(
            f"max_message_bytes: {max_message_bytes} is too small for a context of {identity.max_model_len} tokens: "
            f"opening a session takes up to {needed} bytes; raise it, or lower max_model_len"
        )


def _sampling_defaults(settings: TargetSettings) -> pb.SamplingDefaults:
    directory, _ = find_model_files(settings.model, settings.revision)
    try:
        return sampling_defaults(settings.generation_config, settings.override_generation_config, directory)
    except ValueError as error:
        raise ModelLoadError(str(error)) from error


def _send_tokenizer(runner: ModelRunner, port: EnginePort) -> None:
    content = runner.tokenizer_json.encode()
    config = json.dumps(runner.tokenizer_config, default=str)
    for start in range(0, max(1, len(content)), _TOKENIZER_CHUNK_BYTES):
        piece = pb.GetTokenizerResponse(
            tokenizer_json=content[start : start + _TOKENIZER_CHUNK_BYTES],
            tokenizer_config="" if start else config,
        )
        port.send(FrameKind.TOKENIZER, payload=piece.SerializeToString())


def run_role(
    port: EnginePort,
    settings: SettingsT,
    wire: Wire,
    service: str,
    make_role: Callable[[SessionHost[SessionT], BuiltEngine, SettingsT], Role[SessionT]],
    adapt: Callable[[BuiltEngine], BuiltEngine] = lambda built: built,
    heads: Beside | None = None,
) -> None:
    """Load the model, announce it, and run the role until the servicer goes or stops it.

    `make_role` gets the settings with the model's revision. `adapt` may put a layer between model and role, and may
    raise the errors of loading. `heads`: see `build_engine`.
    With several ranks this process is rank 0 and starts the others, which log as ``service``-rank-N. Raises
    ``RankLost`` if one of them ends.
    """

    def report(reason: str) -> None:
        report_fatal(port, reason)

    with contextlib.ExitStack() as stack:
        ranks = None
        try:
            settings = pinned(settings)
            ranks = stack.enter_context(lead_ranks(settings, service, report, port.pulse))
            built = adapt(build_engine(settings, port, ranks, heads=heads))
            host: SessionHost[SessionT] = make_host(port, settings, wire, built.info)
            role = make_role(host, built, settings)
        except EngineError as error:
            if ranks is not None and isinstance(error.__cause__, RuntimeError):
                ranks.check_cause(error)
            report(str(error))
            return
        serve(port, settings, wire, built.info, host, role, built.full_step_s)
