"""A file to which each finished output of the target is added, so that a stopped run asks only for the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specdec.commands.train.recipe import TrainingRefused


class OutputJournal:
    """Outputs by the number of their temperature, whether they are held out, and the number of their prompt."""

    def __init__(self, file: Path, origin: dict[str, object]) -> None:
        """Read what an earlier run wrote. Raises TrainingRefused if that had another origin."""
        self._file, self._outputs = file, dict[tuple[int, bool, int], list[int]]()
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []  # a line without its end was cut off
        if not lines:
            file.write_text(json.dumps(origin) + "\n", encoding="utf-8")
            return
        if json.loads(lines[0]) != origin:
            raise TrainingRefused(f"{file.parent} holds a run over other texts: name another folder, or remove it")
        for line in lines[1:]:
            temperature, is_held_out, prompt, output = json.loads(line)
            self._outputs[temperature, is_held_out, prompt] = output
        with file.open("r+b") as stream:
            stream.truncate(sum(len(line) + 1 for line in lines))

    def missing(self, temperature: int, is_held_out: bool, num_prompts: int) -> list[int]:
        """Numbers of the prompts that have no output yet."""
        return [number for number in range(num_prompts) if (temperature, is_held_out, number) not in self._outputs]

    def add(self, temperature: int, is_held_out: bool, prompt: int, output: Sequence[int]) -> None:
        """Keep an output."""
        self._outputs[temperature, is_held_out, prompt] = list(output)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([temperature, is_held_out, prompt, list(output)]) + "\n")

    def outputs(self, temperature: int, is_held_out: bool, num_prompts: int) -> list[list[int]]:
        """Outputs of all prompts, in order."""
        return [self._outputs[temperature, is_held_out, number] for number in range(num_prompts)]
