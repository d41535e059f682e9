"""Options of endpoints."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EndpointOptions(BaseModel):
    """Where an endpoint is, and how it is called."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    base_url: str = Field(min_length=1, max_length=2048)
    """Such as https://host/v1; completions are below it."""
    model: str = Field(min_length=1, max_length=256)
    """Its name there."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """File that holds the key and nothing else."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """Environment variable that holds it."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Longest silence of the endpoint."""

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.api_key_file is not None and self.api_key_env is not None:
            raise ValueError("api_key_file and api_key_env are both given")
        return self


class ApiTargetOptions(EndpointOptions):
    """A target behind an endpoint, which verifies blocks of draft tokens."""

    timeout_s: float = Field(default=60.0, gt=0, le=600)
    """Longest silence of the endpoint: a first call may compile something there."""
    fields: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    """What tells the likeliest token after each one of a prompt: vLLM's field, or `echo` with `logprobs`."""
    sampled: Literal["refused", "one_token_calls", "ratio"] = "refused"
    """What is done with requests that are not greedy."""
    max_calls: int = Field(default=16, ge=1, le=256)
    """Calls at once."""

    @model_validator(mode="after")
    def _check_sampled(self) -> Self:
        if self.sampled == "ratio":
            raise ValueError(
                "sampled: the ratio test needs whole distributions, and an endpoint tells their likeliest tokens only: "
                "what it accepts is not distributed as the model's output. one_token_calls is exact"
            )
        return self
