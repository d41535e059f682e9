"""The served tokenizer as a zip archive, from which a router builds its own."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from dataclasses import dataclass

import grpc

from specdec.coordinator.replicas.compatibility import ServedModel
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.wire.errors import IncompatibleReplica, NoTarget

_TIME = (1980, 1, 1, 0, 0, 0)
"""Time of the archive's files: equal files give equal archives."""


@dataclass(frozen=True, slots=True)
class _Built:
    tokenizer: TextTokenizer
    archive: bytes


class TokenizerArchives:
    """Asks a target for the served tokenizer, and keeps its archive until another tokenizer is served."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._building = asyncio.Lock()
        self._built: _Built | None = None

    async def archive(self) -> bytes:
        """tokenizer.json, tokenizer_config.json and generation_config.json, which names the end-of-sequence tokens.

        Raises:
            NotReady: no model is served yet.
            NoTarget: no target is there to ask, or it left while it was asked.
        """
        async with self._building:
            served = self._fleet.require_served()
            if self._built is None or self._built.tokenizer is not served.tokenizer:
                self._built = _Built(served.tokenizer, await self._build(served))
            return self._built.archive

    async def _build(self, served: ServedModel) -> bytes:
        link = next((link for link in self._fleet.targets if link.is_ready), None)
        if link is None:
            raise NoTarget("no target is ready to send its tokenizer: retry")
        try:
            tokenizer_json, config = await link.fetch_tokenizer()
        except (grpc.aio.AioRpcError, IncompatibleReplica) as error:
            raise NoTarget("the target did not send its tokenizer: retry") from error
        ends = json.dumps({"eos_token_id": list(served.identity.eos_token_ids)})
        files = {
            "tokenizer.json": tokenizer_json,
            "tokenizer_config.json": (config or "{}").encode(),
            "generation_config.json": ends.encode(),
        }
        return await asyncio.to_thread(_pack, files)


def _pack(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, _TIME)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return packed.getvalue()
