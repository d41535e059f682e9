"""A model's files: location, identity, tokenizer, stop tokens and mask token."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specdec.engine.checkpoints.download import downloaded
from specdec.engine.checkpoints.folder import check_folder, read_json
from specdec.engine.checkpoints.stored_model import PREFIX, stored
from specdec.engine.checkpoints.tokenizer_conversion import converted_tokenizer
from specdec.engine.errors import ModelLoadError
from specdec.engine.settings import EngineSettings, leads_nowhere
from specdec.wire.tokenizer_files import canonical_json, tokenizer_digest, whole_config

_WHOLE_FILE_BYTES = 1 << 30  # bytes up to which a file is hashed whole
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 64
_NO_PART_OF_MODEL = ("_name_or_path", "transformers_version")
_MASK_KEYS = ("pard_token", "ptd_token_id")  # keys of a config, in vLLM's order
SettingsT = TypeVar("SettingsT", bound=EngineSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Properties that two engines must share to continue each other's sessions."""

    name: str
    revision: str
    weights_digest: str
    architecture: str
    dtype: str
    tokenizer_digest: str
    config_digest: str


def find_model_files(model: str, revision: str | None) -> tuple[Path, str]:
    """The directory of a model and its revision ("" for a plain directory). Downloads those of a hub or a store.

    Raises ``ModelLoadError`` if the name is neither a directory nor what a hub or store has.
    """
    if leads_nowhere(model):
        raise ModelLoadError(f"model: no such directory: {model}")
    path = Path(model).expanduser()
    if path.exists():
        check_folder(path)
        return path, revision or ""
    snapshot = (stored if model.startswith(PREFIX) else downloaded)(model, revision)
    return snapshot, snapshot.name


def pinned(settings: SettingsT) -> SettingsT:
    """The settings with the revision that hub or store have now, of which all parts and ranks of an engine then read.

    Raises ``ModelLoadError`` as `find_model_files`.
    """
    _, revision = find_model_files(settings.model, settings.revision)
    return settings.model_copy(update={"revision": revision or None})


def name_of(model: str, directory: Path) -> str:
    """The name by which a model is served: a hub id, or the folder's."""
    if model.startswith(PREFIX):
        return Path(model).name
    return directory.name if Path(model).is_dir() else model


def weights_digest(directory: Path) -> str:
    """Hex digest over the contents of all safetensors files, in the order of their names.

    Of a file over 1 GiB only the size, the header (names, shapes, types) and 64 samples of 1 MiB, spread evenly, are
    hashed. This tells checkpoints apart, but does not detect tampering. Cost: about 1 s per GB.
    """
    files = sorted(directory.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE_BYTES:
                while chunk := stream.read(_SAMPLE_BYTES):
                    digest.update(chunk)
                continue
            header = stream.read(8)
            digest.update(header + stream.read(min(int.from_bytes(header, "little"), size)))
            for index in range(_NUM_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def config_digest(config: dict[str, Any]) -> str:
    """Hex digest of a config without what changes no logits, whoever wrote it."""
    config = {name: value for name, value in config.items() if name not in _NO_PART_OF_MODEL}
    return hashlib.blake2b(canonical_json(config).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model's fast tokenizer as text, which a process without torch can rebuild."""

    tokenizer_json: str  # "" where the model ships none
    config: dict[str, Any]

    @property
    def digest(self) -> str:
        """Hex digest of the tokenizer's content, independent of formatting; "" without a tokenizer."""
        return tokenizer_digest(self.tokenizer_json) if self.tokenizer_json else ""

    @property
    def vocab_size(self) -> int | None:
        """The largest token id of the tokenizer and its configuration plus 1; None without a tokenizer."""
        if not self.tokenizer_json:
            return None
        return max((token_id for _, token_id in self._tokens()), default=-1) + 1 or None

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token by which the configuration says that texts end; None where it names none."""
        named = self.config.get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        if not (self.tokenizer_json and isinstance(text, str)):
            return None
        return next((token_id for token, token_id in self._tokens() if token == text), None)

    def _tokens(self) -> Iterator[tuple[str, int]]:
        """Tokens with their ids: added ones, then those of the vocabulary."""
        content = json.loads(self.tokenizer_json)
        yield from ((token["content"], token["id"]) for token in content.get("added_tokens", []))
        added = self.config.get("added_tokens_decoder") or {}
        yield from ((flags.get("content", ""), int(token_id)) for token_id, flags in added.items())
        vocab = content.get("model", {}).get("vocab", {})
        if isinstance(vocab, dict):
            yield from vocab.items()
        else:
            yield from ((entry[0], token_id) for token_id, entry in enumerate(vocab))


def read_tokenizer(directory: Path) -> TokenizerFiles:
    """Read ``tokenizer.json`` and ``tokenizer_config.json``, with what stands beside them.

    Without the former, other formats are converted. Raises ``ModelLoadError`` if that fails, or if a file is no JSON.
    """
    tokenizer, config_file = directory / "tokenizer.json", directory / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    if tokenizer.is_file():
        read_json(tokenizer)
        text = tokenizer.read_text(encoding="utf-8")
    else:
        text = converted_tokenizer(directory, config)
    try:
        return TokenizerFiles(text, whole_config(config, directory))
    except ValueError as error:
        raise ModelLoadError(f"model: {error}") from error


def read_eos_token_ids(
    directory: Path, config_eos: int | list[int] | None, tokenizer: TokenizerFiles, vocab_size: int
) -> tuple[int, ...]:
    """End-of-sequence ids of ``generation_config.json``, or else of the model's config, and the tokenizer's.

    Only those below ``vocab_size``, as a model gives no others.

    Models that were tuned to chat may end a turn with a token that only their tokenizer names.

    Raises ``ModelLoadError``.
    """
    file = directory / "generation_config.json"
    eos = read_json(file).get("eos_token_id") if file.is_file() else None
    if eos is None:
        eos = config_eos
    found = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(type(token_id) is int for token_id in found):
        raise ModelLoadError(f"model: {file} has eos_token_id {eos!r:.50}, which is neither an id nor a list of ids")
    own = tokenizer.eos_token_id
    found = found if own is None else (*found, own)
    return tuple(dict.fromkeys(token_id for token_id in found if 0 <= token_id < vocab_size))  # -1: none


def parallel_mask(model: str, revision: str | None, wanted: bool | None, num_ids: int) -> int | None:
    """The mask token's id from the model's config; None: tokens are drafted one by one.

    Args:
        model, revision: the settings of these names.
        wanted: the setting `parallel_drafting`; None: use a mask if there is one.
        num_ids: rows of the model's embedding.

    Raises:
        ModelLoadError: a mask is wanted but missing, or outside the embedding.
    """
    if wanted is False:
        return None
    directory, _ = find_model_files(model, revision)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    key = next((key for key in _MASK_KEYS if config.get(key) is not None), None)
    if key is None:
        if wanted:
            raise ModelLoadError(f"parallel_drafting: the model's config has none of {', '.join(_MASK_KEYS)}")
        return None
    mask = config[key]
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < num_ids:
        raise ModelLoadError(f"parallel_drafting: {key} is {mask!r}, not an id below {num_ids}")
    return mask
