"""Builds the native CPU kernels into the wheel; everything else about the package is in pyproject.toml.

A wheel holds one library for each variant of a machine type (specdec/engine/native/variants.py), chosen at run time.
They are called through ctypes, so a wheel fits every version of Python. Read from the environment:

    SPECDEC_PURE_WHEEL=1            build a wheel without kernels, for any machine: they are compiled on first use
    SPECDEC_WHEEL_MACHINE=aarch64   build for another machine than this, with its cross compiler (or $CXX)
"""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

sys.path.insert(0, str(Path(__file__).parent))

from specdec.engine.native.build import (
    HEADERS,
    PREBUILT_FOLDER,
    SOURCES,
    NativeUnavailable,
    compile_library,
    find_compiler,
    library_name,
)
from specdec.engine.native.variants import variants_for

NATIVE = Path("specdec/engine/native")
PROTOS = Path("proto")
IS_PURE = os.environ.get("SPECDEC_PURE_WHEEL", "0") not in {"", "0"}
MACHINE = os.environ.get("SPECDEC_WHEEL_MACHINE") or platform.machine()
# The wheel does not ask for the C++ library of the machine that built it.
LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-s")


class BuildKernels(Command):
    """Compiles all variants. An editable install has none: a checkout compiles its kernels on first use."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if self.editable_mode:
            return
        paths = [Path(path) for path in self.get_outputs()]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        foreign = platform.machine() != MACHINE
        try:
            compiler = find_compiler([f"{MACHINE}-linux-gnu-g++"]) if foreign else find_compiler()
            for variant, library in zip(variants_for(MACHINE), paths, strict=True):
                self.announce(f"compiling {library} with {compiler}", level=2)
                compile_library(compiler, variant, library, LINK_FLAGS)
        except NativeUnavailable as error:
            raise SystemExit(
                f"the native kernels cannot be built: {error}\n"
                "Install a C++ compiler (Debian: apt-get install g++), or set SPECDEC_PURE_WHEEL=1 for a wheel without."
            ) from error

    def get_source_files(self) -> list[str]:
        return [str(NATIVE / name) for name in (*HEADERS, *SOURCES)]

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib or "", NATIVE, PREBUILT_FOLDER)
        return [str(folder / library_name(variant)) for variant in variants_for(MACHINE)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildProtos(Command):
    """Puts the protos beside the code that is generated from them, for clients in other languages."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if not self.editable_mode:
            for source, copy in self.get_output_mapping().items():
                Path(copy).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)

    def get_source_files(self) -> list[str]:
        return [str(path) for path in sorted(PROTOS.rglob("*.proto"))]

    def get_outputs(self) -> list[str]:
        return list(self.get_output_mapping().values())

    def get_output_mapping(self) -> dict[str, str]:
        lib = Path(self.build_lib or "")
        return {path: str(lib / Path(path).relative_to(PROTOS)) for path in self.get_source_files()}


class Build(build):
    own: ClassVar = ["build_protos"] if IS_PURE else ["build_protos", "build_kernels"]
    sub_commands: ClassVar = [*build.sub_commands, *((name, None) for name in own)]


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", "any" if IS_PURE else f"linux_{MACHINE}")


class Specdec(Distribution):
    def has_ext_modules(self) -> bool:
        return not IS_PURE


setup(
    distclass=Specdec,
    cmdclass={
        "build": Build,
        "build_kernels": BuildKernels,
        "build_protos": BuildProtos,
        "bdist_wheel": BdistWheel,
    },
)
