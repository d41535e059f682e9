"""Settings of the plugin, from environment variables SPECDEC_VLLM_*, and facts of vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from specdec.wire.settings import Addresses, PeerSettings
from specdec.wire.tokenizer_files import tokenizer_digest

PREFIX = "SPECDEC_VLLM_"


class PluginSettings(PeerSettings, BaseSettings):
    """Each field is an environment variable, such as SPECDEC_VLLM_DRAFTS; those of TLS are as of a coordinator."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    drafts: Addresses = Field(min_length=1, description="Drafts, host:port or dns:///name:port, separated by commas.")
    max_wait_ms: float = Field(
        default=50, ge=0, le=1000, description="Most milliseconds that a step of vLLM waits for drafts."
    )
    stall_s: float = Field(
        default=5.0, gt=0, description="Seconds of a draft's silence after which its rows go to another draft."
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, description="Seconds to open the stream to a draft.")
    lookup_interval_s: float = Field(default=10.0, gt=0, description="Seconds between look-ups of dns:/// names.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the plugin's Prometheus metrics on all interfaces."
    )


class WrongSettings(ValueError):
    """The plugin cannot start; the text is one line with the remedy."""


def read_settings() -> PluginSettings:
    """The settings of this process's environment. Raises WrongSettings."""
    try:
        return PluginSettings.model_validate({})
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + "_".join(map(str, first["loc"][:1])).upper()
        hint = "set it to the drafts' addresses, host:port,host:port or dns:///name:port"
        cause = hint if first["type"] == "missing" else first["msg"]
        raise WrongSettings(f"specdec-vllm: {name}: {cause}") from None


@dataclass(frozen=True, slots=True)
class Engine:
    """What the plugin knows of vLLM's engine."""

    num_speculative_tokens: int
    max_model_len: int
    vocab_size: int
    tokenizer_digest: str | None
    """Of the target's tokenizer.json; None where the file is not on this machine."""


def read_engine(vllm_config: Any) -> Engine:
    """The facts of a VllmConfig. Raises WrongSettings where vLLM's configuration has another form."""
    try:
        model = vllm_config.model_config
        return Engine(
            num_speculative_tokens=int(vllm_config.speculative_config.num_speculative_tokens),
            max_model_len=int(model.max_model_len),
            vocab_size=int(model.get_vocab_size()),
            tokenizer_digest=_digest(str(model.tokenizer), getattr(model, "tokenizer_revision", None)),
        )
    except (AttributeError, TypeError) as error:
        raise WrongSettings(f"specdec-vllm does not know this version of vLLM ({error}): see docs/vllm.md") from error


def _digest(name: str, revision: str | None) -> str | None:
    file = Path(name) / "tokenizer.json"
    if not file.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
        except (ImportError, ValueError):
            return None
        if not isinstance(found, str):
            return None
        file = Path(found)
    return tokenizer_digest(file.read_text(encoding="utf-8"))
