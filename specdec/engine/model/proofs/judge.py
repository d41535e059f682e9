"""Holds step models of a loaded model against its own dense pass: the self-test, and what proves more."""

import logging

import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry, stored_dtype
from specdec.engine.attention.paged import RecordingKernel
from specdec.engine.errors import ModelNotSupported
from specdec.engine.model.loader import LoadedModel
from specdec.engine.model.mixtures.routes import MOST_CHANGED, Routes
from specdec.engine.model.model_check import refusing
from specdec.engine.model.proofs.positions import FarProof
from specdec.engine.model.proofs.probe import ProbeLog, SelfTest, tolerance
from specdec.engine.model.ragged import RaggedModel, StepModel
from specdec.engine.model.switches import shortened
from specdec.engine.settings import EngineSettings
from specdec.engine.states.memory import CellShape

_logger = logging.getLogger(__name__)

DenseLogits = dict[tuple[int, ...], torch.Tensor]
"""Logits ``[T, V]`` by the tokens of a sequence; empty: no self-test."""


class Judge:
    """Dense logits of a model and the self-test that compares with them. Call its methods in their order."""

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, *, has_native_kernels: bool) -> None:
        self._loaded = loaded
        self._settings = settings
        self._has_native_kernels = has_native_kernels
        self._kv_dtype = stored_dtype(settings.kv_cache_dtype, loaded.dtype)
        is_fp8 = "fp8" in (settings.weight_quantization, settings.kv_cache_dtype)
        self.most_error = tolerance(loaded.dtype, is_fp8=is_fp8)
        """Error of logits over their spread, at most."""
        self.cells: list[CellShape] = []
        """Shapes of recurrent layers' states."""
        self._probe = SelfTest(loaded.vocab_size, loaded.max_model_len, settings.block_size, loaded.device)
        self._far: FarProof | None = None
        self._routes = Routes(loaded.model)
        self._expected: DenseLogits = {}
        self._short_routes = Routes(loaded.model)
        self._short: DenseLogits = {}

    def compute_dense(self) -> None:
        """Compute logits with the model's own attention, also with shortened windows and scales."""
        if not self._settings.self_test:
            return
        self._expected = self._dense_logits(self._routes)
        with shortened(self._loaded.model) as has_switches:
            self._short = self._dense_logits(self._short_routes) if has_switches else {}

    def record_attention(self, ragged: RaggedModel) -> RecordingKernel:
        """What a model's layers ask of attention. Raises ModelNotSupported if its windows or scales are not kept."""
        if self._short:
            self._prove_switches(ragged)
        recorded = ragged.record_attention(self._probe)
        self.cells = ragged.recurrent.shapes
        if self._expected:
            block_size = self._settings.block_size
            self._far = FarProof(self._loaded, recorded, ragged.mask_windows, block_size, self._kv_dtype)
        return recorded

    def test(self, step_model: StepModel, geometries: list[LayerGeometry]) -> tuple[float, bool]:
        """The error against dense logits along the same routes, and whether rows were invariant.

        Without a self-test native kernels count as row-invariant, as they fix the order of sums; torch does not. Raises
        ModelNotSupported if routers differ more often than near-ties explain.
        """
        if not self._expected:
            return 0.0, self._has_native_kernels
        return self._compare(step_model, geometries, self._expected, self._routes)

    def _dense_logits(self, routes: Routes) -> DenseLogits:
        expected = {}
        with refusing(self._loaded.model.config.model_type):
            for tokens in self._probe.sequences:
                ids = torch.tensor([tokens], device=self._loaded.device)
                with routes.recording([tuple(tokens[: end + 1]) for end in range(len(tokens))]):
                    logits = self._loaded.model(input_ids=ids, use_cache=False).logits[0]
                expected[tuple(tokens)] = logits.float()
        return expected

    def _prove_switches(self, ragged: RaggedModel) -> None:
        """Compare paged logits with dense ones on both sides of every window and scale."""
        loaded = self._loaded
        with shortened(loaded.model):
            recorded = ragged.record_attention(self._probe)
            self.cells = ragged.recurrent.shapes
            error, _ = self._compare(ragged, recorded.geometries, self._short, self._short_routes)
        if not error <= self.most_error:
            raise ModelNotSupported(
                loaded.model.config.model_type,
                f"beyond its windows or attention scales, paged logits differ from dense ones by "
                f"{error:.2g} of their spread",
            )

    def _compare(
        self, step_model: StepModel, geometries: list[LayerGeometry], expected: DenseLogits, routes: Routes
    ) -> tuple[float, bool]:
        loaded, probe = self._loaded, self._probe
        cache = KVCache(
            geometries,
            probe.num_blocks,
            self._settings.block_size,
            self._kv_dtype,
            loaded.device,
            probe.memory(self.cells, loaded.device),
        )
        with refusing(loaded.identity.architecture):
            log: ProbeLog = probe.run(step_model, cache, around=routes.following)
            far = 0.0 if self._far is None else self._far.error(step_model)
        if routes.share_changed:
            _logger.info("routers chose other experts than in a dense pass", extra={"share": routes.share_changed})
        if routes.share_changed > MOST_CHANGED:
            raise ModelNotSupported(
                loaded.model.config.model_type,
                f"in {routes.share_changed:.0%} of cases its routers choose other experts than in a dense pass",
            )
        near = log.error(lambda tokens: expected[tuple(tokens.tolist())], probe.sequences)
        return near if far <= self.most_error else far, log.row_invariant
