"""Download a hub model's files into the hub's cache: watched, and compared with their digests."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specdec.engine.errors import ModelLoadError

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"]
"""Names of the files that a model consists of."""
_SHA256_DIGITS, _GIT_DIGITS = 64, 40
_READ_BYTES = 1 << 22
_STALE_S = 3600.0
"""Seconds without a write after which a part of a file is taken for that of a process that has ended."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is."""

    num_bytes: int
    """Bytes of this download that have arrived."""
    total_bytes: int
    elapsed_s: float


def downloaded(model: str, revision: str | None) -> Path:
    """The folder of a hub model's files, downloaded if they are not there. Raises `ModelLoadError`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=WANTED))
    except Exception as error:  # the hub client raises many unrelated types
        raise ModelLoadError(f"model: {model} is neither a directory nor available from the hub: {error}") from error


def fetch(model: str, revision: str | None, watch: Callable[[Progress], None], every_s: float) -> tuple[Path, int]:
    """Download what is missing of a hub model, and compare its bytes with the hub's digests.

    A broken connection goes on where it was; after a restart, whole files are not downloaded again.

    Args:
        model: hub id, org/name.
        revision: branch, tag or commit; None: main.
        watch: called every `every_s` seconds, and at the end, from a thread of its own.
        every_s: seconds between two calls.

    Returns:
        The folder of the files, and the bytes that were missing.

    Raises:
        ModelLoadError: the hub has no such model or is not reached, or a file differs from its digest.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        planned = snapshot_download(model, revision=revision, allow_patterns=WANTED, dry_run=True)
    except Exception:  # the hub client raises many unrelated types
        return downloaded(model, revision), 0  # It is complete, or the error has all causes.
    missing = [file for file in planned if file.will_download]
    total_bytes = sum(file.file_size or 0 for file in missing)
    # files -> commit -> snapshots -> the model's folder
    blobs = [Path(file.local_path).parents[len(Path(file.filename).parts) + 1] / "blobs" for file in planned[:1]]
    _drop_stale_parts(blobs)
    before = _bytes_of(blobs)
    with watched(lambda: _bytes_of(blobs) - before, total_bytes, watch, every_s):
        folder = downloaded(model, revision)
        damaged = [file.filename for file in missing if not _equals_its_digest(folder / file.filename)]
        for name in damaged:
            (folder / name).resolve().unlink()
            (folder / name).unlink(missing_ok=True)
        if damaged:
            names = ", ".join(sorted(damaged))
            raise ModelLoadError(f"model: {names} of {model} differ from their digests and are deleted; run it again")
    return folder, total_bytes


@contextlib.contextmanager
def watched(
    num_bytes: Callable[[], int], total_bytes: int, watch: Callable[[Progress], None], every_s: float
) -> Iterator[None]:
    """Tell how far the download inside is, every `every_s` seconds from a thread of its own, and at its good end."""
    began_s, has_ended = time.monotonic(), threading.Event()

    def tell() -> None:
        watch(Progress(num_bytes(), total_bytes, time.monotonic() - began_s))

    def run() -> None:
        while not has_ended.wait(every_s):
            tell()

    watcher = threading.Thread(target=run, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()
    tell()


def _bytes_of(folders: list[Path]) -> int:
    found = 0
    for folder in folders:
        for path in folder.glob("*"):
            try:
                found += path.stat().st_size
            except FileNotFoundError:  # a part that has just become a whole file
                continue
    return found


def _drop_stale_parts(folders: list[Path]) -> None:
    for folder in folders:
        for path in folder.glob("*.incomplete"):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)


def _equals_its_digest(path: Path) -> bool:
    """Whether a file is what its blob's name says: SHA-256 of large files, git's object id of small ones."""
    blob = path.resolve()
    if len(blob.name) == _SHA256_DIGITS:
        digest = hashlib.sha256()
    elif len(blob.name) == _GIT_DIGITS:
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return True  # A mirror named the file by something else.
    with blob.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest() == blob.name
