"""The request of /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specdec.gateway.api.fields import (
    UNSUPPORTED_IN_ALL,
    Items,
    NumLogprobs,
    PackedIds,
    PositiveCount,
    SamplingFields,
    TokenIds,
)

DEFAULT_MAX_TOKENS = 16
Prompt = str | list[int] | PackedIds
Prompts = (
    str
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[Items[str], Field(min_length=1)]
    | Annotated[Items[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1)]
)


class CompletionRequest(SamplingFields):
    """Texts or token ids to continue."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_IN_ALL | {
        *("add_special_tokens", "length_penalty", "prompt_embeds", "suffix"),
    }

    meaningful: ClassVar[frozenset[str]] = frozenset({"add_special_tokens", "best_of", "max_tokens"})
    token_fields: ClassVar[frozenset[str]] = frozenset({"prompt"})

    prompt: Prompts = Field(description="A text, a list of texts, token ids, or a list of lists of token ids.")
    max_tokens: Annotated[int, Field(ge=-1, lt=2**32)] | None = Field(
        None,
        description="Default 16; otherwise as in chats. 0 generates nothing, for log-probabilities of the prompt; "
        "-1 generates as many as fit.",
    )
    logprobs: NumLogprobs | None = Field(None, description="Alternatives per token; absent: no log-probabilities.")
    echo: bool | None = Field(None, description="Begin the answer with the prompt and its log-probabilities.")
    best_of: PositiveCount | None = Field(None, description="Must equal n.")

    add_special_tokens: Literal[True] | None = None
    length_penalty: None = None
    prompt_embeds: None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts; a single one as a list of one."""
        prompt = self.prompt
        if isinstance(prompt, str | PackedIds) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def most_tokens(self) -> int | None:
        """Most output tokens of a choice; None: as many as fit the context."""
        wanted = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return None if wanted < 0 else wanted
