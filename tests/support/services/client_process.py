"""A client of either version as a process, whose streams pause until the test continues them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from specdec.client import Completion
from specdec.v1 import coordinator_pb2 as api
from tests.support.releases import Build
from tests.support.services.every_request import Answer

LINE_S = 120.0
MOST_LINE_BYTES = 16 * 1024 * 1024


class ClientProcess:
    """An async context manager: sends the requests at entry, and kills the process at exit."""

    def __init__(self, build: Build, address: str, requests: Mapping[str, api.GenerateRequest]) -> None:
        self._build = build
        self._address = address
        self._requests = requests
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> ClientProcess:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("client_main.py")), self._address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_LINE_BYTES,
            env={**os.environ, **self._build.environment},
        )
        who = await self._line("its version")
        is_right = who["version"] == self._build.version and who["file"].startswith(str(self._build.folder))
        assert is_right, f"a client of {self._build} was started, and is {who}"
        bodies = [base64.b64encode(body.SerializeToString()).decode() for body in self._requests.values()]
        self._write("\n".join([*bodies, "\n"]))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def have_begun(self) -> None:
        """Wait until all streams have their first tokens and pause."""
        assert (await self._line("the first tokens of all streams")) == {"begun": True}

    async def answers(self) -> dict[str, Answer]:
        """Continue all streams and wait for their ends."""
        self._write("\n")
        return {name: self._answer(await self._line(f"the answer to {name!r}")) for name in self._requests}

    def _answer(self, line: Mapping[str, Any]) -> Answer:
        completion = Completion()
        for chunk in line["chunks"]:
            completion.add(api.GenerateResponse.FromString(base64.b64decode(chunk)))
        return Answer.of(completion)

    def _write(self, text: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(text.encode())

    async def _line(self, what: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(LINE_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise AssertionError(f"the client {self._build} has not got {what} within {LINE_S:g} s") from None
        assert line, f"the client {self._build} ended before it got {what}; what it said of it is in its stderr"
        return json.loads(line)
