"""Check that heads read the layers that they were trained on, tried on the target before it is deployed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdec.commands.doctor.findings import Finding, failed, passed, warned
from specdec.commands.measuring.prompts import prompts_for
from specdec.commands.measuring.requests import Prompt
from specdec.config import TargetSettings
from specdec.config.drafter_options import HeadOptions
from specdec.engine.checkpoints.files import find_model_files, read_tokenizer
from specdec.engine.errors import EngineError

_NUM_PROMPTS, _NUM_TOKENS = 8, 32
_USELESS = 0.02
"""Share of accepted first tokens that every head exceeds if it reads the right layers."""


def check_head_layers(settings: TargetSettings, prompts: Sequence[Prompt] | None) -> Iterator[Finding]:
    """Yield a line for each head of a target's settings, with the acceptance at its layer ids and their neighbours.

    `prompts`: texts or token ids; None: those of `prompts_for`. Loads the target, and decodes 32 tokens after each
    prompt up to five times for each head.
    """
    from tokenizers import Tokenizer

    from specdec.commands.train.job import load_target  # torch
    from specdec.commands.train.trial import try_head_layers
    from specdec.drafting.heads.checkpoint import HeadRefused

    heads = [options for options in settings.drafters if isinstance(options, HeadOptions)]
    what = "heads read the layers that they were trained on"
    if not heads:
        yield passed(what, "no head is set")
        return
    try:
        files = read_tokenizer(find_model_files(settings.model, None)[0])
        loaded = load_target(settings.model, settings.device, settings.num_threads)
    except (EngineError, HeadRefused) as error:
        yield failed(what, f"the target does not load: {error}", "see docs/troubleshooting.md")
        return
    asked = prompts_for(files.digest).prompts[:_NUM_PROMPTS] if prompts is None else prompts
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    token_ids = [tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt) for prompt in asked]
    for options in heads:
        what = f"{options.method} reads the layers that it was trained on"
        try:
            verdict = try_head_layers(loaded, options, token_ids, _NUM_TOKENS)
        except (EngineError, HeadRefused) as error:
            yield failed(what, str(error), "name a head that was trained for this target")
            continue
        if verdict is None:
            yield passed(what, "the last hidden state")
            continue
        measured = "first tokens accepted: " + ", ".join(
            f"{trial.acceptance:.0%} with {', '.join(map(str, trial.layer_ids))}" for trial in verdict.trials
        )
        if verdict.advised is not None:
            yield warned(what, measured, f"set layer_ids to {', '.join(map(str, verdict.advised))}")
        elif verdict.trials[0].acceptance < _USELESS:
            yield failed(
                what, measured, "use another head: this one is useless at its own and at neighbouring layer ids"
            )
        else:
            yield passed(what, measured)
