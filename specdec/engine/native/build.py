"""Builds the native kernels: one compiler call, once per source version, compiler and CPU type."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = ("kernels.cpp", "decoder.cpp", "thread_pool.cpp", "sampling.cpp")
_HEADERS = ("simd.h", "thread_pool.h", "linear.h", "attention.h")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w")
_BUILD_TIMEOUT_S = 300
_LIBRARY = "libspecdec_kernels.so"


class NativeUnavailable(RuntimeError):
    """No native kernels on this machine: no compiler, or it failed."""


def build_library() -> Path:
    """Return the compiled library, compiling it on the first call on this machine (about 10 s).

    It lies in ``$SPECDEC_NATIVE_CACHE`` or the user's cache directory, under a name made of the sources, the
    flags, the compiler and the CPU's feature flags; concurrent processes wait for one another. Raises
    ``NativeUnavailable``.
    """
    compiler = _find_compiler()
    directory = _cache_root() / build_key(compiler)
    library = directory / _LIBRARY
    if library.is_file():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                _compile(compiler, library)
    except OSError as error:
        raise NativeUnavailable(f"the kernel cache {directory} is not writable: {error}") from error
    return library


def build_key(compiler: str) -> str:
    """Hex name of a build: equal for equal sources, flags, compiler and CPU features."""
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=12)
    for name in (*_HEADERS, *_SOURCES):
        digest.update((here / name).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\n".join([*_FLAGS, version, platform.machine(), cpu_features()]).encode())
    return digest.hexdigest()


def cpu_features() -> str:
    """What the CPU can do, as the operating system lists it; the processor's name where it does not."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        pass
    return platform.processor()


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        found = shutil.which(name)
        if found:
            return found
    raise NativeUnavailable("no C++ compiler (c++, g++ or clang++) is installed")


def _cache_root() -> Path:
    chosen = os.environ.get("SPECDEC_NATIVE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "native"


def _compile(compiler: str, library: Path) -> None:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / _LIBRARY
        command = [compiler, *_FLAGS, *(str(here / name) for name in _SOURCES), "-o", str(unfinished)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailable(f"{compiler} did not end within {_BUILD_TIMEOUT_S} s") from error
        if done.returncode != 0:
            raise NativeUnavailable(f"{compiler} failed: {done.stderr[-2000:]}")
        unfinished.rename(library)
