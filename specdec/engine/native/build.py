"""Finds the native kernels in the package, or compiles them on first use, once per version of sources and compiler.

Needs only the standard library, as ``setup.py`` builds the wheel's kernels with it.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specdec.engine.native.variants import ISA_VARIABLE, Variant, choose_variant

SOURCES = (
    "kernels.cpp",
    "linear.cpp",
    "packing.cpp",
    "decoder.cpp",
    "experts.cpp",
    "latent.cpp",
    "thread_pool.cpp",
    "convolution.cpp",
    "scan.cpp",
    "sampling.cpp",
    "ahead.cpp",
)
HEADERS = ("simd.h", "thread_pool.h", "packed.h", "linear.h", "experts.h", "attention.h")
PREBUILT_FOLDER = "lib"
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w")
_HERE = Path(__file__).parent
_BUILD_TIMEOUT_S = 300


class NativeUnavailable(RuntimeError):
    """There are no built kernels, and no compiler, or it failed."""


def load_library() -> tuple[ctypes.CDLL, Variant]:
    """The kernels for this CPU. Raises ``NativeUnavailable``, or ``UnsupportedIsa`` if ``SPECDEC_NATIVE_ISA`` is
    wrong.
    """
    variant = choose_variant()
    if variant is None:
        raise NativeUnavailable(f"{ISA_VARIABLE} is none")
    library = build_library(variant)
    try:
        return ctypes.CDLL(str(library)), variant
    except OSError as error:
        raise NativeUnavailable(f"{library} cannot be loaded: {error}") from error


def build_library(variant: Variant) -> Path:
    """A variant's library: the package's own, or one compiled on the first call (about 15 s).

    Compiled libraries are kept in ``$SPECDEC_NATIVE_CACHE`` or the user's cache directory, named by sources, flags and
    compiler. Concurrent processes wait for each other. Raises ``NativeUnavailable``.
    """
    prebuilt = _HERE / PREBUILT_FOLDER / library_name(variant)
    if prebuilt.is_file():
        return prebuilt
    compiler = find_compiler()
    try:
        directory = _cache_root() / build_key(compiler, variant)
    except OSError as error:
        raise NativeUnavailable(f"{compiler} cannot be run: {error}") from error
    library = directory / library_name(variant)
    if library.is_file():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                compile_library(compiler, variant, library)
    except OSError as error:
        raise NativeUnavailable(f"the kernel cache {directory} is not writable: {error}") from error
    return library


def library_name(variant: Variant) -> str:
    """File name of a variant's library."""
    return f"libspecdec_{variant.name}.so"


def build_key(compiler: str, variant: Variant) -> str:
    """Hex name of a build, from sources, flags and compiler."""
    digest = hashlib.blake2b(digest_size=12)
    for name in (*HEADERS, *SOURCES):
        digest.update((_HERE / name).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\n".join([*_FLAGS, *variant.flags, version, platform.machine()]).encode())
    return digest.hexdigest()


def find_compiler(names: Sequence[str] = ("c++", "g++", "clang++")) -> str:
    """Path of ``$CXX``, or of the first installed compiler of `names`. Raises ``NativeUnavailable``."""
    for name in filter(None, (os.environ.get("CXX"), *names)):
        found = shutil.which(name)
        if found:
            return found
    raise NativeUnavailable(f"no C++ compiler ({', '.join(names)}) is installed")


def compile_library(compiler: str, variant: Variant, library: Path, link_flags: Sequence[str] = ()) -> None:
    """Compile a variant; the file appears complete or not at all. Raises ``NativeUnavailable`` and ``OSError``."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / library.name
        sources = [str(_HERE / name) for name in SOURCES]
        command = [compiler, *_FLAGS, *variant.flags, *sources, *link_flags, "-o", str(unfinished)]
        code, said = _run(command)
        if code != 0:
            raise NativeUnavailable(f"{compiler} failed: {said[-2000:]}")
        unfinished.rename(library)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a compiler; returns its exit code and error output. An exception kills it with its children.

    Raises ``NativeUnavailable`` after a time limit.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", process_group=0
    )
    try:
        _, said = process.communicate(timeout=_BUILD_TIMEOUT_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # with the driver's children, which do the work
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NativeUnavailable(f"{command[0]} did not end within {_BUILD_TIMEOUT_S} s") from error
        raise
    return process.returncode, said


def _cache_root() -> Path:
    chosen = os.environ.get("SPECDEC_NATIVE_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "native"
    except RuntimeError as error:
        raise NativeUnavailable(f"no home directory for compiled kernels; set SPECDEC_NATIVE_CACHE: {error}") from error
