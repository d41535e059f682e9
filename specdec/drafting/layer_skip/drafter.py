"""Drafts with the target itself, with sublayers skipped (arXiv:2309.08168, 2404.16710).

Committed tokens have the full target's keys and values. Those of drafted tokens are written behind them, in free slots
or blocks, for the sublayers that run. The verifying step overwrites all that it reads; entries behind its end are never
read. So drafting needs no memory of its own and leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog

from specdec.config.drafter_options import LayerSkipOptions
from specdec.drafting.heads.checkpoint import HeadRefused
from specdec.drafting.heads.drawing import Choices, after, choose, without_noise
from specdec.drafting.heads.session import HeadAsk, HeadSession, StatelessHead
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.interface import ROOT, Capabilities, Context, GrowingOffer, Offer, OfNoUse
from specdec.drafting.layer_skip.matchness import WINDOW, matchness
from specdec.drafting.layer_skip.search import SkipSearch, as_skipped
from specdec.engine.drawing.native import DrawingDecoder
from specdec.engine.drawing.rows import DrawRow, DrawRule
from specdec.engine.model.beside import PassRows, SkippingPass
from specdec.engine.model.skipping import LEAST_AGREEMENT, agreement, sample_ids, too_different
from specdec.engine.sampling.perturbed_top import shares
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.engine.sublayers import SkippedSublayers, skipped_sublayers

CAPABILITIES = Capabilities(needs_engine=True, is_serial=True, places=frozenset({"target", "draft_service"}))
NUM_CHOICES = 3
"""Tokens per depth: the drafted one and its runners-up."""
_JUDGED_GUESSES = 128
_log = structlog.get_logger("specdec.replica.worker")


@dataclass(slots=True)
class SkipSession(HeadSession):
    """The drafter's state of a session."""

    rule: DrawRule | None = None
    """Rule to sample its tokens in native code; None: not possible, or not known yet."""
    is_known: bool = False
    guess: tuple[int, int] | None = None
    """Position and id of the last draft's first token."""

    def take(self, seq: object, features: object) -> None:
        """Ignored: it reads no hidden states."""


@dataclass(slots=True)
class _Draft:
    """A session's draft."""

    ask: HeadAsk
    seq: EngineSequence
    depth: int
    path: tuple[int, ...] = ()
    path_score: float = 1.0
    levels: list[Choices] = field(default_factory=list)

    def add(self, choices: Choices) -> None:
        self.levels.append(choices)
        if choices:
            self.path = (*self.path, choices[0][0])
            self.path_score *= choices[0][1]

    def offer(self) -> Offer | None:
        """The chain, followed by runners-up as the room allows."""
        offer = GrowingOffer(self.ask.room)
        parents: list[int] = []
        parent: int | None = ROOT
        for choices in self.levels:
            if not choices or parent is None:
                break
            parents.append(parent)
            parent = offer.add(parent, *choices[0])
        if not self.ask.is_chain:
            for above, choices in zip(parents, self.levels, strict=False):
                for token, score in choices[1:]:
                    offer.add(above, token, score)
        return offer.done()


class LayerSkip(StatelessHead):
    """Drafts for all sessions at once; a `specdec.drafting.heads.session.Head`."""

    name = "layer_skip"
    capabilities = CAPABILITIES
    layer_ids: tuple[int, ...] = ()

    def __init__(
        self, target: HeadTarget, skipped: SkippedSublayers, num_speculations: int, search: SkipSearch | None
    ) -> None:
        """`search`: looks for better sets; None: `skipped` stays. Raises ModelLoadError if no pass can skip
        sublayers.
        """
        self.target = target
        self.search = search
        self.search_s = 0.0
        """Seconds spent on the search."""
        self.max_search_share = 0.0
        self._told_s = 0.0
        self._began_s = time.monotonic()
        self._depth = num_speculations
        self._num_judged = self._num_right = 0
        self.use(skipped)

    def use(self, skipped: SkippedSublayers) -> None:
        """Skip these sublayers from now on."""
        runner = self.target.runner
        self.skipped = skipped
        self.left = skipped.left(runner.num_layers)
        self.run: SkippingPass = runner.without(skipped)
        self._drawing = None
        if self.run.fused is not None and self.target.sampler.is_native:
            self._drawing = DrawingDecoder(self.run.fused, self.run.cache, runner.vocab_size)

    def open(self, context: Context) -> SkipSession:
        """Begin a session."""
        return SkipSession()

    def absorb(self, sessions: Sequence[HeadSession]) -> None:
        """Nothing to take in: it reads the target's own keys and values."""

    def draft(self, asks: Sequence[HeadAsk]) -> list[Offer | None]:
        """See `Head`. Cost: one pass of the remaining sublayers per depth, over one row per session.

        A session's draft ends when the probability of its path falls below the cost of a token, in full steps. Raises
        OfNoUse if hardly any drafted token was right.
        """
        self._judge(asks)
        drafts: dict[int, _Draft] = {}
        for index, ask in enumerate(asks):
            draft = self._begin(ask)
            if draft is not None:
                drafts[index] = draft
        if drafts:
            self._grow(list(drafts.values()))
        offers = [drafts[index].offer() if index in drafts else None for index in range(len(asks))]
        for ask, offer in zip(asks, offers, strict=True):
            assert isinstance(ask.session, SkipSession)
            ask.session.guess = None if offer is None else (ask.row.position, offer.token_ids[0])
        if self.search is not None:
            self._search(self.search, asks)
        return offers

    def _begin(self, ask: HeadAsk) -> _Draft | None:
        seq, position = ask.seq, ask.row.position
        if seq is None or seq.num_pending_tokens != 1 or len(seq.token_ids) != position:
            return None
        limit = min(self._depth, ask.room.depth, ask.room.num_nodes, self.target.runner.max_model_len + 1 - position)
        depth = self.target.engine.ahead.borrow(seq, limit) if limit > 0 else 0
        if depth == 0:
            return None
        return _Draft(replace(ask, row=without_noise(ask.row)) if ask.is_chain else ask, seq, depth)

    def _grow(self, drafts: list[_Draft]) -> None:
        rows = self._rows(drafts)
        logits = self.run(rows.batch(self.target.runner.device))
        rules = [self._rule(draft.ask) for draft in drafts]
        if self._drawing is not None and all(rule is not None for rule in rules):
            wanted = [
                DrawRow(
                    rule=rule,
                    logits_row=row,
                    position=len(draft.seq.token_ids),
                    num_rounds=draft.depth,
                    block_ids=draft.seq.block_ids,
                    least_path_score=self.left,
                )
                for row, (draft, rule) in enumerate(zip(drafts, rules, strict=True))
                if rule is not None
            ]
            for draft, drawn in zip(drafts, self._drawing.draw(wanted, logits, NUM_CHOICES), strict=True):
                for token_ids, scores in drawn:
                    draft.add(list(zip(token_ids, shares(scores), strict=True)))
            return
        growing = drafts
        while True:
            found = choose(
                self.target.sampler, logits, [after(draft.ask.row, draft.path) for draft in growing], NUM_CHOICES
            )
            for draft, choices in zip(growing, found, strict=True):
                draft.add(choices)
            growing = [
                draft
                for draft in growing
                if draft.levels[-1] and len(draft.path) < draft.depth and draft.path_score >= self.left
            ]
            if not growing:
                return
            logits = self.run(self._rows(growing).batch(self.target.runner.device))

    def _rows(self, drafts: Sequence[_Draft]) -> PassRows:
        rows = PassRows(self.target.runner.block_size)
        for draft in drafts:
            tokens = draft.seq.token_ids
            rows.add_sequence(draft.seq.block_ids)
            token = draft.path[-1] if draft.path else tokens[-1]
            rows.add(token, len(tokens) - 1 + len(draft.path))
        return rows

    def _rule(self, ask: HeadAsk) -> DrawRule | None:
        session = ask.session
        assert isinstance(session, SkipSession)
        if not session.is_known:
            session.is_known = True
            session.rule = None if ask.row.params.adjusts_logits else DrawRule(ask.row.params)
        return session.rule

    def _judge(self, asks: Sequence[HeadAsk]) -> None:
        """Count how often the first drafted token was right, verified or not."""
        for ask in asks:
            session = ask.session
            if isinstance(session, SkipSession) and session.guess is not None and ask.seq is not None:
                position, token = session.guess
                session.guess = None
                if position < len(ask.seq.token_ids):
                    self._num_judged += 1
                    self._num_right += ask.seq.token_ids[position] == token
        if self._num_judged < _JUDGED_GUESSES:
            return
        share = self._num_right / self._num_judged
        self._num_judged = self._num_right = 0
        if share < LEAST_AGREEMENT and (self.search is None or self.search.is_over):
            raise OfNoUse(too_different(self.skipped, share))

    def take_found(self) -> tuple[float, float] | None:
        """Seconds of search since the last call, and the best set's share of equal tokens; None: no search since
        then.
        """
        if self.search is None or self.search.matchness is None or self.search_s == self._told_s:
            return None
        elapsed_s, self._told_s = self.search_s - self._told_s, self.search_s
        return elapsed_s, self.search.matchness

    def _search(self, search: SkipSearch, asks: Sequence[HeadAsk]) -> None:
        """Score one more set, unless the search has used its share of the time since the start."""
        now_s = time.monotonic()
        if search.is_over or self.search_s > self.max_search_share * (now_s - self._began_s):
            return
        ask = next((ask for ask in asks if ask.seq is not None and ask.seq.num_computed_tokens > WINDOW), None)
        if ask is None:
            return
        trial = search.propose()
        score = matchness(self.target, self.target.runner.without(as_skipped(trial)), ask)
        of_best = matchness(self.target, self.run, ask)
        if score is not None and of_best is not None and search.observe(trial, score, of_best):
            self.use(search.skipped)
            _log.info(
                "layers_skipped",
                skipped=str(self.skipped),
                matchness=round(score, 3),
                num_trials=search.num_trials,
                search_s=round(self.search_s, 3),
            )
        self.search_s += time.monotonic() - now_s


def make_layer_skip(options: LayerSkipOptions, target: HeadTarget) -> LayerSkip:
    """Make the drafter of these options.

    Raises:
        HeadRefused: the options name layers that the target lacks.
        ModelLoadError: the target's runner cannot skip sublayers.
        OfNoUse: the remaining layers hardly agree with the target on a text, and no search is configured.
    """
    runner = target.runner
    search: SkipSearch | None = None
    try:
        if options.searches:
            search = SkipSearch(runner.num_layers, options.skip_ratio)
            skipped = search.skipped
        else:
            skipped = skipped_sublayers(
                runner.num_layers, options.exit_layer, options.skip_attention_layers, options.skip_mlp_layers
            )
    except ValueError as error:
        raise HeadRefused(f"drafters: {error}") from error
    if options.max_search_share == 0:
        search = None
    made = LayerSkip(target, skipped, options.num_speculations, search)
    made.max_search_share = options.max_search_share
    ids = [] if runner.settings.load_format == "dummy" else sample_ids(runner.tokenizer_json, runner.vocab_size)
    ids = ids[: runner.max_model_len]
    if ids:
        share = agreement(runner.likeliest(ids, made.run.step_model), runner.likeliest(ids))
        _log.info("layers_skipped", skipped=str(skipped), agreement=round(share, 3), left=round(made.left, 3))
        if share < LEAST_AGREEMENT and search is None:
            raise OfNoUse(too_different(skipped, share))
    return made
