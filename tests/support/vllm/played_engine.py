"""An engine that schedules, samples and verifies greedily as vLLM does, and calls a proposer after each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from specdec_vllm.remote_draft import RemoteDraft

Propose = Callable[..., list[list[int]]]


def vllm_config(k: int = 5, max_model_len: int = 512, vocab_size: int = 320, **model: Any) -> Any:
    """The parts of a VllmConfig that a proposer reads."""
    fields = {"max_model_len": max_model_len, "get_vocab_size": lambda: vocab_size, "tokenizer": "", **model}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(**fields),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


@dataclass
class PlayedRequest:
    """A request of the engine."""

    name: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    num_computed: int = 0
    proposal: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_proposed: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_over(self) -> bool:
        return len(self.output) >= self.max_tokens


class PlayedEngine:
    """Rows move, prompts come in chunks, requests are left out of steps, preempted and resumed, and end."""

    def __init__(
        self,
        propose: Propose,
        next_token: Callable[[Sequence[int]], int],
        *,
        config: Any,
        seed: int = 0,
        chunk: int = 8,
        num_rows: int = 16,
        unrest: float = 0.2,
        check: Callable[[list[int], list[int]], None] = lambda tokens, proposal: None,
    ) -> None:
        """`unrest`: probability of a preemption, of a step without some request, and of a new order, per step.

        `check` gets a row's tokens and its proposal.
        """
        self._propose = propose
        self._next_token = next_token
        self._config = config
        self._random = random.Random(seed)
        self._chunk = chunk
        self._unrest = unrest
        self._check = check
        self._rows = np.zeros((num_rows, config.model_config.max_model_len), np.int32)
        self._lengths = np.zeros(num_rows, np.int32)
        self.running: list[PlayedRequest] = []
        self.ended: list[PlayedRequest] = []

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        self.running.append(PlayedRequest(name, list(prompt), len(prompt), max_tokens))

    def play(self, between: Callable[[int], None] = lambda step: None) -> dict[str, list[int]]:
        """Step until all requests have ended; returns their outputs."""
        step = 0
        while self.running:
            between(step)
            self.step()
            step += 1
        return {request.name: request.output for request in self.ended}

    def step(self) -> None:
        if self._random.random() < self._unrest:
            self._random.shuffle(self.running)
        if self._random.random() < self._unrest:
            preempted = self._random.choice(self.running)
            preempted.num_computed, preempted.proposal = 0, []
        batch = list(self.running)
        if len(batch) > 1 and self._random.random() < self._unrest:
            batch.pop(self._random.randrange(len(batch)))
        sampled = [self._sample(request) for request in batch]
        for index, request in enumerate(batch):
            self._rows[index] = -7  # what other rows left there
            self._rows[index, : len(request.tokens)] = request.tokens
            self._lengths[index] = len(request.tokens)
        proposals = self._propose(sampled, self._lengths, self._rows, slot_mappings=None)
        assert len(proposals) == len(batch)
        room = self._config.model_config.max_model_len
        for request, tokens, proposal in zip(batch, sampled, proposals, strict=True):
            assert len(proposal) <= min(
                self._config.speculative_config.num_speculative_tokens, room - len(request.tokens)
            )
            assert tokens or not proposal
            request.proposal = proposal
            request.num_proposed += len(proposal)
            if proposal:
                self._check(list(request.tokens), proposal)
        self.ended += [request for request in self.running if request.is_over]
        self.running = [request for request in self.running if not request.is_over]

    def _sample(self, request: PlayedRequest) -> list[int]:
        """One step of a request: a chunk of its tokens, or the verification of its proposal."""
        if request.num_computed < len(request.tokens) - 1:
            request.num_computed = min(len(request.tokens) - 1, request.num_computed + self._chunk)
            if request.num_computed < len(request.tokens) - 1:
                return []
        sampled: list[int] = []
        for proposed in (*request.proposal, None):
            sampled.append(self._next_token([*request.tokens, *sampled]))
            if sampled[-1] != proposed:
                break
            request.num_accepted += 1
        del sampled[request.max_tokens - len(request.output) :]
        request.tokens += sampled
        request.num_computed = len(request.tokens) - 1
        request.proposal = []
        return sampled


def until_answered(proposer: RemoteDraft) -> Callable[[int], None]:
    """Waits before every third step until the draft has answered each row: a row without an answer yet is not waited
    for, and steps of a played engine take no time.
    """
    drafts = proposer._drafts

    def between(step: int) -> None:
        if step % 3 == 0:
            with drafts.lock:
                assert drafts.lock.wait_for(
                    lambda: all(one.home is None or one.is_answered for one in drafts.sessions), 20
                )

    return between
