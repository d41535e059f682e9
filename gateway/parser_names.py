"""Which parsers read the served model's output: the settings name them, or its chat template tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specdec.gateway.chat.template_parsers import AUTO, ParserPair, parsers_of_template
from specdec.gateway.upstream.caller import CallerStub
from specdec.v1 import coordinator_pb2 as api

_KEPT_S = 60.0
"""Seconds before a coordinator is asked again: a roll-out may bring another template."""


class ParserNames:
    """The parsers of one gateway. With `auto` a coordinator is asked for the template once a minute."""

    def __init__(self, reasoning: str, tools: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`reasoning` and `tools`: names of parsers, or auto."""
        self._reasoning = reasoning
        self._tools = tools
        self._clock = clock
        self._kept: ParserPair | None = None if AUTO in (reasoning, tools) else ParserPair(reasoning, tools)
        self._asked_s = float("inf") if self._kept is not None else float("-inf")
        self._asking = asyncio.Lock()

    async def of(self, caller: Callable[[], CallerStub]) -> ParserPair:
        """The parsers, asked for in a caller's name. Raises SpecdecError if no coordinator answers, or not to it.

        One caller asks at a time: the answer has the whole tokenizer. Meanwhile others use the former answer.
        """
        if self._kept is not None and (self._asking.locked() or not self._is_old):
            return self._kept
        async with self._asking:
            if self._kept is None or self._is_old:
                info: api.GetModelInfoResponse = await caller().call(
                    "GetModelInfo", api.GetModelInfoRequest(with_tokenizer=True)
                )
                self._kept = parsers_of_template(info.tokenizer.chat_template, self._reasoning, self._tools)
                self._asked_s = self._clock()
        return self._kept

    @property
    def _is_old(self) -> bool:
        return self._clock() - self._asked_s > _KEPT_S
