"""Options of OpenAI-compatible endpoints that draft or verify."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EndpointOptions(BaseModel):
    """An endpoint's address, model, key and time limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    base_url: str = Field(min_length=1, max_length=2048)
    """URL such as https://host/v1, above /completions."""
    model: str = Field(min_length=1, max_length=256)
    """The model's name at the endpoint."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """File that holds the key and nothing else."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the key."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Longest silence of the endpoint, in seconds."""

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.api_key_file is not None and self.api_key_env is not None:
            raise ValueError("api_key_file and api_key_env are both given")
        return self


class ApiTargetOptions(EndpointOptions):
    """A target behind an endpoint, which verifies blocks of draft tokens."""

    timeout_s: float = Field(default=60.0, gt=0, le=600)
    """Longest silence of the endpoint, in seconds: a first call may compile kernels there."""
    fields: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    """Field of the answer with the likeliest token after each prompt token: vLLM's own, or `echo` with `logprobs`."""
    sampled: Literal["refused", "one_token_calls", "ratio"] = "refused"
    """Treatment of requests that are not greedy."""
    max_calls: int = Field(default=16, ge=1, le=256)
    """Most calls at once."""

    @model_validator(mode="after")
    def _check_sampled(self) -> Self:
        if self.sampled == "ratio":
            raise ValueError(
                "sampled: the ratio test needs whole distributions, and an endpoint sends their likeliest tokens only: "
                "accepted tokens would not be distributed as the model's output; use one_token_calls, which is exact"
            )
        return self
