"""Tensors in mapped files of a folder, filled text by text; an interrupted fill goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from specdec.commands.train.recorded.texts import Text

_SAVE_EVERY_S = 5.0

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor, by its name."""


class MappedTensors:
    """The tensors of one kind and origin, and the number of texts whose rows are filled."""

    def __init__(self, folder: Path, kind: str, layout: Layout, origin: Mapping[str, object]) -> None:
        """Map the files, which are named after `kind` and a digest of `origin`: JSON values that tell the content."""
        tensors = {name: [list(shape), str(dtype)] for name, (shape, dtype) in layout.items()}
        self._what = {"tensors": tensors, "origin": dict(origin)}
        stem = f"{kind}-{hashlib.blake2b(json.dumps(self._what).encode(), digest_size=6).hexdigest()}"
        self._note = folder / f"{stem}.json"
        self._num_filled = 0
        if self._note.is_file():
            self._num_filled = int(json.loads(self._note.read_text(encoding="utf-8"))["num_texts"])
        self.tensors = {
            name: torch.from_file(
                str(folder / f"{stem}-{name}.bin"), shared=True, size=math.prod(shape), dtype=dtype
            ).view(shape)
            for name, (shape, dtype) in layout.items()
        }

    def unfilled(self, num_texts: int) -> Iterator[int]:
        """Numbers of the texts to fill, each of which counts as filled when the next one is asked for."""
        saved_s = time.monotonic()
        for number in range(self._num_filled, num_texts):
            yield number
            if number + 1 == num_texts or time.monotonic() - saved_s > _SAVE_EVERY_S:
                self._save(number + 1)
                saved_s = time.monotonic()

    def _save(self, num_texts: int) -> None:
        part = self._note.with_suffix(".part")
        part.write_text(json.dumps({**self._what, "num_texts": num_texts}), encoding="utf-8")
        os.replace(part, self._note)


def digest_of_texts(texts: Sequence[Text]) -> str:
    """Digest of the tokens of texts and of what they are used for."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(repr((text.token_ids, len(text.prompt_ids), text.is_held_out)).encode())
    return digest.hexdigest()
