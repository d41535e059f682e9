"""Checks of a settings file of `specdec up`: known settings, and models that fit together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specdec.commands.doctor.findings import Finding, failed, passed, warned
from specdec.commands.doctor.head_layers import check_head_layers
from specdec.commands.measuring.requests import Prompt
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.config.drafter_options import HeadOptions, MtpOptions, describe_problem
from specdec.config.retired import REMOVED, notices
from specdec.engine.checkpoints.files import find_model_files, read_tokenizer
from specdec.engine.errors import ModelLoadError

_READ_LAST_LAYER = ("medusa", "eagle")
_MOST_PROBLEMS = 3
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx")


def check_settings(
    up: Mapping[str, Any],
    target: str,
    draft: str,
    *,
    tries_heads: bool = False,
    prompts: Sequence[Prompt] | None = None,
) -> Iterator[Finding]:
    """Yield the lines about the section `up` of a file; `target` and `draft` are its default models.

    `tries_heads`: load the target and try its heads on `prompts` (`check_head_layers`).
    """
    models = {"target": str(up.get("target", target)), "draft": str(up.get("draft", draft))}
    settings = {role: _values(up.get(f"{role}_set", ())) for role in ("target", "draft", "coordinator")}
    kinds: dict[str, Any] = {"target": TargetSettings, "draft": DraftSettings, "coordinator": CoordinatorSettings}
    checked: dict[str, Any] = {}
    for role, kind in kinds.items():
        for told in notices(frozenset(settings[role])).values():
            yield warned(f"settings of the {role} are current", told, "see docs/upgrades.md")
        settings[role] = {name: value for name, value in settings[role].items() if name not in REMOVED}
        needed = {"model": models[role]} if role in models else {"targets": ("127.0.0.1:50052",)}
        try:
            checked[role] = kind(**{**needed, **settings[role]})
        except ValidationError as error:
            problems = "; ".join(_problem(problem) for problem in error.errors(include_url=False)[:_MOST_PROBLEMS])
            yield failed(f"settings of the {role} are valid", problems, "see docs/settings.md")
        else:
            yield passed(f"settings of the {role} are valid", f"{len(settings[role])} set")
    yield from _models(models, has_draft=up.get("num_drafts", 1) != 0)
    if "target" in checked:
        yield _policy(checked["target"])
        yield from _heads(checked["target"])
        if tries_heads:
            yield from check_head_layers(checked["target"], prompts)


def _problem(problem: Mapping[str, Any]) -> str:
    setting, *within = problem["loc"] or ("",)
    if setting == "drafters":
        return f"drafters: {describe_problem(problem)}"
    if problem["type"] == "extra_forbidden" and not within:
        return f"{setting} is no setting"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return ": ".join([*(str(part) for part in (setting, *within) if part != ""), message])


def _policy(settings: TargetSettings) -> Finding:
    what = "speculation stops when it does not pay"
    if settings.adaptive_speculation:
        return passed(what, "adaptive_speculation is on")
    return warned(what, "adaptive_speculation is off", "switch it on, unless speculation pays at every load")


def _heads(settings: TargetSettings) -> Iterator[Finding]:
    from specdec.drafting.heads.checkpoint import HeadRefused  # torch
    from specdec.drafting.heads.config import read_config

    for options in settings.drafters:
        if not isinstance(options, HeadOptions):
            continue
        what = f"{options.method}: its files can be read, and layer ids are explicit"
        if isinstance(options, MtpOptions):
            yield passed(what, "it reads the target's last hidden state; loading checks its files")
            continue
        try:
            config = read_config(json.loads((Path(options.model) / "config.json").read_text("utf-8")))
        except (OSError, ValueError, HeadRefused) as error:
            yield failed(what, str(error), "name a head's folder in a known format (docs/drafters.md)")
            continue
        ids = options.layer_ids or config.layer_ids
        if options.method in _READ_LAST_LAYER:
            yield passed(what, "it reads the target's last hidden state")
        elif ids is None:
            do = "set layer_ids to those of its training: wrong ids show in acceptance only"
            yield warned(what, "neither its config nor layer_ids names layers: they are guessed", do)
        else:
            source = "settings" if options.layer_ids else "its config"
            named = ", ".join(map(str, ids))
            yield passed(what, f"{named} (from {source}; k is the output of k layers); RoPE by halves")


def _models(models: Mapping[str, str], *, has_draft: bool) -> Iterator[Finding]:
    folders: dict[str, Path] = {}
    for role, model in models.items():
        if role == "draft" and not has_draft:
            continue
        try:
            folders[role] = find_model_files(model, None)[0]
        except ModelLoadError as error:
            yield failed(f"the {role} exists", str(error), "name a folder or a hub id")
    if "target" not in folders or "draft" not in folders:
        return
    digests = {role: read_tokenizer(folder).digest for role, folder in folders.items()}
    what = "tokenizers are equal by content"
    if digests["target"] != digests["draft"]:
        measured = f"{digests['target'][:12]} and {digests['draft'][:12]}: the draft translates"
        yield warned(
            what, measured, "use a draft with the target's tokenizer if there is one: more tokens are accepted"
        )
    else:
        yield passed(what, digests["target"][:12])
    lengths = {role: _context(folder) for role, folder in folders.items()}
    what = "the draft's context is as long as the target's"
    measured = f"draft {lengths['draft']}, target {lengths['target']} tokens"
    if None in lengths.values() or lengths["draft"] >= lengths["target"]:  # type: ignore[operator]
        yield passed(what, measured)
    else:
        do = f"set the target's max_model_len to {lengths['draft']}, or use a draft with a longer context"
        yield warned(what, measured, do)


def _context(folder: Path) -> int | None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return next((int(config[key]) for key in _CONTEXT_KEYS if key in config), None)


def _values(given: Sequence[str]) -> dict[str, object]:
    pairs = (str(entry).partition("=") for entry in given)
    return {
        name.strip().replace("-", "_"): {"true": True, "false": False}.get(value, value) for name, _, value in pairs
    }
