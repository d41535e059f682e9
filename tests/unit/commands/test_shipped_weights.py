"""The shipped target's weights are committed compressed and unpacked whole or not at all."""

import lzma
import shutil
from pathlib import Path

import pytest

from specdec.commands import shipped_pair
from specdec.commands.shipped_pair import CHECKOUT, PACKED, unpack_weights


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    shutil.copy(CHECKOUT / PACKED, tmp_path / PACKED)
    (tmp_path / "target" / "config.json").write_text("{}")
    return tmp_path


def names(pair: Path) -> set[str]:
    return {path.name for path in (pair / "target").iterdir()}


def test_a_checkout_without_weights_unpacks_them_when_the_pair_is_asked_for(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped_pair, "CHECKOUT", pair)
    assert shipped_pair.shipped_pair() == pair
    assert names(pair) == {"config.json", "model.safetensors", "model.safetensors.xz"}
    unpacked = (pair / "target" / "model.safetensors").read_bytes()
    assert unpacked == (CHECKOUT / "target" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("damage", ["one bit", "cut"])
def test_damaged_weights_leave_no_file(pair: Path, damage: str) -> None:
    packed = bytearray((pair / PACKED).read_bytes())
    if damage == "one bit":
        packed[len(packed) // 2] ^= 1
    (pair / PACKED).write_bytes(packed[: -(1 << 20) if damage == "cut" else None])
    with pytest.raises((lzma.LZMAError, EOFError)):
        unpack_weights(pair)
    assert names(pair) == {"config.json", "model.safetensors.xz"}
