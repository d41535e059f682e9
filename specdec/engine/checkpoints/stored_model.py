"""Models in an S3-compatible store: s3://BUCKET/PATH is downloaded into the cache, one folder for each revision.

A revision is the digest of the objects' names, sizes and ETags, so that files which a running process has mapped are
never replaced, and whoever names a revision gets these files or an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import structlog

from specdec.engine.checkpoints.download import WANTED, Progress, watched
from specdec.engine.checkpoints.object_store import ObjectStore, StoredObject, StoreUnreachable, TransferBroken
from specdec.engine.errors import ModelLoadError

PREFIX = "s3://"
_SOURCE = re.compile(r"s3://([a-z0-9][-.a-z0-9]{1,61}[a-z0-9])(?:/(.*))?")
_REVISION = re.compile(r"[0-9a-f]{8,64}")
_REVISION_DIGITS = 16
_AT_ONCE = 4
"""Files that are downloaded at once."""
_MOST_FUTILE = 5
"""Transfers of a file in a row that bring nothing, after which it is given up."""
_WAIT_S = 0.5
"""Seconds before the first repetition; each further one takes twice as long."""
_PART, _UNFINISHED = ".incomplete", ".unfinished"
_log = structlog.get_logger(__name__)


def stored(model: str, revision: str | None) -> Path:
    """The folder of a stored model's files, downloaded if they are not there. Raises ModelLoadError."""
    return fetch_stored(model, revision, lambda _: None, 3600.0)[0]


def fetch_stored(
    model: str, revision: str | None, watch: Callable[[Progress], None], every_s: float
) -> tuple[Path, int]:
    """Download what is missing of a stored model, and compare it with the store's checksums.

    A file goes on where it was after a broken connection and after a restart. If the store does not answer, files of
    an earlier download are taken.

    Args:
        model: s3://BUCKET/PATH.
        revision: beginning of a revision, of eight digits at least; None: what the store has now.
        watch: see `download.fetch`.
        every_s: see `download.fetch`.

    Returns:
        The folder of the files, whose name is the revision, and the bytes that were missing.

    Raises:
        ModelLoadError: the store has no such model or revision or is not reached, or a file differs.
    """
    place = _SOURCE.fullmatch(model)
    if place is None:
        raise ModelLoadError(f"model: {model[:200]!r} is not {PREFIX}BUCKET/PATH")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ModelLoadError(f"revision: {revision[:80]!r} is no revision of {PREFIX}: name 8 to 64 hex digits")
    bucket, path = place[1], (place[2] or "").strip("/")
    home = _home(bucket, path)
    if revision is not None and (found := _revisions(home, revision)):
        return found[0], 0
    try:
        store = ObjectStore(model, bucket)
        objects = _wanted(model, store.objects(f"{path}/" if path else ""))
    except StoreUnreachable as error:
        if revision is None and (found := _revisions(home, "")):
            _log.warning("store_unreachable", model=model, revision=found[0].name, error=str(error))
            return found[0], 0
        raise
    now = _revision_of(objects)
    if not now.startswith((revision or "")[: len(now)]):
        raise ModelLoadError(f"revision: {model} has {now} now, not {revision}: name that, or restore the files")
    folder = home / now
    with _locked(home):
        if folder.is_dir():
            return folder, 0
        missing = _download(model, store, objects, home / f"{now}{_UNFINISHED}", watch, every_s)
        (home / f"{now}{_UNFINISHED}").rename(folder)
    return folder, missing


def _home(bucket: str, path: str) -> Path:
    """The folder of a model's revisions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "s3"
    digest = hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    readable = re.sub(r"[^-._A-Za-z0-9]", "-", path)[-80:]
    return cache / f"{bucket}--{readable}-{digest}"


def _revisions(home: Path, begin: str) -> list[Path]:
    """Folders of whole downloads whose revision begins so, the latest first."""
    found = [each for each in home.glob(f"{begin[:_REVISION_DIGITS]}*") if _REVISION.fullmatch(each.name)]
    return sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)


def _wanted(model: str, objects: Sequence[StoredObject]) -> list[StoredObject]:
    found = [each for each in objects if any(fnmatch(each.name, pattern) for pattern in WANTED)]
    if not found:
        raise ModelLoadError(f"model: {model} has no files of a model ({', '.join(WANTED)}): name its folder")
    return sorted(found, key=lambda each: each.name)


def _revision_of(objects: Sequence[StoredObject]) -> str:
    lines = "".join(f"{each.name}\t{each.num_bytes}\t{each.etag}\n" for each in objects)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:_REVISION_DIGITS]


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One process at a time downloads a model; a lock ends with its process."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(
    model: str,
    store: ObjectStore,
    objects: Sequence[StoredObject],
    folder: Path,
    watch: Callable[[Progress], None],
    every_s: float,
) -> int:
    """Download into a folder what it lacks; returns the bytes that it lacked."""
    for former in folder.parent.glob(f"*{_UNFINISHED}"):
        if former != folder:
            shutil.rmtree(former, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    before = _num_bytes(folder)
    missing = sum(each.num_bytes for each in objects) - before
    free = shutil.disk_usage(folder).free
    if missing > free:
        needs, has = missing / 2**30, free / 2**30
        raise ModelLoadError(
            f"model: {model} needs {needs:.2f} GiB more, and {folder} has {has:.2f} GiB: enlarge the cache"
        )
    with watched(lambda: _num_bytes(folder) - before, missing, watch, every_s):
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            largest_first = sorted(objects, key=lambda each: each.num_bytes, reverse=True)
            outcomes = list(pool.map(lambda each: _file(model, store, each, folder / each.name), largest_first))
        finally:
            pool.shutdown(cancel_futures=True)
    damaged = sorted(each.name for each, is_equal in zip(largest_first, outcomes, strict=True) if is_equal is False)
    if damaged:
        names = ", ".join(damaged)
        raise ModelLoadError(f"model: {names} of {model} differ from their checksums and are deleted; run it again")
    unknown = [each.name for each, is_equal in zip(largest_first, outcomes, strict=True) if is_equal is None]
    if unknown:
        _log.warning("compared_by_size_only", model=model, files=unknown[:20])
    return missing


def _file(model: str, store: ObjectStore, wanted: StoredObject, path: Path) -> bool | None:
    """Download a file unless it is there; whether it equals its object, as `ObjectStore.equals`."""
    if path.exists():
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    part, num_futile = path.with_name(path.name + _PART), 0
    part.touch()
    while (at := part.stat().st_size) < wanted.num_bytes:
        why = "the store sent nothing"
        try:
            with part.open("ab") as out:
                for piece in store.read(wanted, at):
                    out.write(piece)
                    if out.tell() > wanted.num_bytes:
                        break
        except TransferBroken as error:
            why = str(error)
        num_futile = 0 if part.stat().st_size > at else num_futile + 1
        if num_futile >= _MOST_FUTILE:
            raise ModelLoadError(
                f"model: {wanted.name} of {model} broke off at {at} of {wanted.num_bytes} bytes: {why}; "
                "run it again, what has arrived stays"
            )
        if part.stat().st_size < wanted.num_bytes:
            time.sleep(_WAIT_S * 2**num_futile)
    is_equal = store.equals(wanted, part) if part.stat().st_size == wanted.num_bytes else False
    if is_equal is False:
        part.unlink()
    else:
        part.rename(path)
    return is_equal


def _num_bytes(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a part that has just become a whole file
            continue
    return found
