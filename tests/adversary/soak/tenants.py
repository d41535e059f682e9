"""Tenants that come and go, in the file of API keys that coordinators read again when it changes."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from pathlib import Path


class Tenants:
    """`current` may send requests; those that left are known for one more change, for what they have under way."""

    def __init__(self, path: Path, num: int) -> None:
        self._path = path
        self._number = 0
        self._leaving: deque[str] = deque()
        self._coming: list[str] = []
        self.operator = self._key("operator")
        """Of who asks for the state of things; stays."""
        self.current: deque[str] = deque(self._new() for _ in range(num))
        self._write()

    @property
    def num_ever(self) -> int:
        """How many there have been."""
        return self._number

    def change(self) -> None:
        """The newest comes into use, the oldest leaves, and another is announced."""
        self.current.extend(self._coming)
        if self._coming:
            self._leaving.append(self.current.popleft())
        while len(self._leaving) > 2:
            self._leaving.popleft()
        self._coming = [self._new()]
        self._write()

    def pick(self, rng: random.Random) -> str:
        """The key of one."""
        return rng.choice(list(self.current))

    def _new(self) -> str:
        self._number += 1
        return self._key(f"tenant-{self._number}")

    @staticmethod
    def _key(name: str) -> str:
        return f"{name}-{'0123456789abcdef' * 2}"

    def _write(self) -> None:
        keys = [self.operator, *self._leaving, *self.current, *self._coming]
        entries = [
            {"id": key, "tenant": key.rpartition("-")[0], "sha256": hashlib.sha256(key.encode()).hexdigest()}
            for key in keys
        ]
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"keys": entries}), encoding="utf-8")
        fresh.replace(self._path.with_suffix(".json"))
