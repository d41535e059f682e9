"""Which build of the native kernels a machine gets, and where from."""

import os
import platform
import pwd
import select
import signal
from pathlib import Path

import pytest
import torch

from specdec.engine.errors import ModelLoadError
from specdec.engine.model.runner import ModelRunner
from specdec.engine.native import build, variants
from specdec.engine.native.kernels import NativeKernels
from specdec.engine.native.variants import UnsupportedIsa, choose_variant, variants_for
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.settings import EngineSettings
from tests.support.engine.isa_selections import ASKED_ISA
from tests.support.engine.kernel_variants import fast_compiler
from tests.support.engine.tiny_models import save_tiny_model

AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> "Cpu":
    monkeypatch.delenv("SPECDEC_NATIVE_ISA", raising=False)
    return Cpu(monkeypatch)


class Cpu:
    """Says what the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def is_a(self, machine: str, features: frozenset[str]) -> None:
        self._monkeypatch.setattr(platform, "machine", lambda: machine)
        self._monkeypatch.setattr(variants, "cpu_features", lambda: features)


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", AVX512, "avx512"),
        ("x86_64", AVX512 | {"amx_tile", "amx_bf16", "amx_int8"}, "avx512"),
        ("x86_64", AVX512 - {"avx512vl"}, "avx2"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", AVX2 - {"fma"}, "generic"),
        ("x86_64", frozenset(), "generic"),
        ("aarch64", frozenset({"fp", "asimd"}), "neon"),
        ("riscv64", frozenset(), "generic"),
    ],
)
def test_a_cpu_gets_the_fastest_kernels_that_it_can_run(
    cpu: Cpu, machine: str, features: frozenset[str], expected: str
) -> None:
    cpu.is_a(machine, features)
    chosen = choose_variant()
    assert chosen is not None
    assert chosen.name == expected


def test_the_environment_can_choose_slower_kernels_or_none(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.is_a("x86_64", AVX512)
    for name in ("avx512", "avx2", "generic"):
        monkeypatch.setenv("SPECDEC_NATIVE_ISA", name)
        chosen = choose_variant()
        assert chosen is not None
        assert chosen.name == name
    monkeypatch.setenv("SPECDEC_NATIVE_ISA", "none")
    assert choose_variant() is None


@pytest.mark.parametrize(
    ("asked", "reason"), [("avx512", "lacks avx512bw, avx512cd"), ("neon", "avx512, avx2, generic or none")]
)
def test_asking_for_what_the_cpu_lacks_is_an_error_that_says_so(
    cpu: Cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, reason: str
) -> None:
    cpu.is_a("x86_64", AVX2)
    monkeypatch.setenv("SPECDEC_NATIVE_ISA", asked)
    with pytest.raises(UnsupportedIsa, match=reason):
        choose_variant()
    with pytest.raises(ModelLoadError, match=reason):
        ModelRunner.load(EngineSettings(model=str(save_tiny_model("llama", tmp_path)), device="cpu"))
    with pytest.raises(UnsupportedIsa, match=reason):
        Sampler(10, "cpu")


def test_the_kernels_that_run_are_those_that_were_chosen() -> None:
    """Also under each selection of `make test-isa`, which sets the environment."""
    aten = torch.backends.cpu.get_cpu_capability().lower()
    assert aten == os.environ.get("ATEN_CPU_CAPABILITY", aten)
    kernels = NativeKernels(1)
    chosen = {variant.name: variant for variant in variants_for(platform.machine())}[kernels.variant]
    assert kernels.variant == os.environ.get(ASKED_ISA, kernels.variant)
    assert kernels.lanes == chosen.lanes


def test_a_second_build_takes_the_first_ones_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", fast_compiler(tmp_path))
    monkeypatch.setattr(build, "SOURCES", ("thread_pool.cpp",))  # the smallest
    variant = variants_for(platform.machine())[-1]
    first = build.build_library(variant)
    built_at = first.stat().st_mtime_ns
    assert build.build_library(variant) == first
    assert first.stat().st_mtime_ns == built_at
    assert first.is_relative_to(tmp_path)


def test_builds_of_different_variants_have_different_names() -> None:
    compiler = build.find_compiler()
    names = [build.build_key(compiler, variant) for variant in variants_for("x86_64")]
    assert len(set(names)) == len(names)


def test_libraries_of_the_package_are_taken_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    variant = variants_for(platform.machine())[0]
    shipped = tmp_path / "lib" / build.library_name(variant)
    shipped.parent.mkdir()
    shipped.touch()
    assert build.build_library(variant) == shipped


def test_a_library_that_does_not_load_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(build, "build_library", lambda variant: broken)
    with pytest.raises(build.NativeUnavailable, match=r"broken\.so cannot be loaded"):
        build.load_library()


def test_a_failing_compiler_is_a_typed_error_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECDEC_NATIVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.NativeUnavailable, match="no such flag"):
        build.load_library()


def test_a_compiler_that_cannot_be_run_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_bytes(b"\x7fELF, but of no machine")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.NativeUnavailable, match="broken cannot be run"):
        build.load_library()


def test_a_user_without_a_home_gets_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run under a number of its own."""
    for name in ("HOME", "XDG_CACHE_HOME", "SPECDEC_NATIVE_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(build.NativeUnavailable, match="set SPECDEC_NATIVE_CACHE"):
        build.load_library()


def test_a_compiler_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, told = tmp_path / "slow", tmp_path / "pid"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 600 &\necho $! > {told}\nwait\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECDEC_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_BUILD_TIMEOUT_S", 3.0)
    with pytest.raises(build.NativeUnavailable, match="did not end within 3"):
        build.load_library()
    assert has_ended(int(told.read_text()))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is within some seconds; kills it if not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(pidfd, closefd=True):
        if select.select([pidfd], [], [], 10.0)[0]:
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return False


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_NATIVE_ISA", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_no_compiler_is_a_typed_error() -> None:
    with pytest.raises(build.NativeUnavailable, match="no C\\+\\+ compiler"):
        build.load_library()


@pytest.mark.usefixtures("no_compiler")
def test_without_kernels_an_engine_starts_and_one_line_says_what_to_install(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    runner = ModelRunner.load(EngineSettings(model=str(directory), device="cpu", num_blocks=16))
    (line,) = [record.getMessage() for record in caplog.records if "no native kernels" in record.getMessage()]
    assert "no C++ compiler" in line
    assert "install specdec from a wheel for this machine, or a C++ compiler" in line
    assert ("row invariance holds" in line) == runner.row_invariant


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("self_test", [True, False])
def test_deterministic_refuses_torch_with_that_line_where_it_is_not_measured_to_be_row_invariant(
    self_test: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if self_test:
        monkeypatch.setattr("specdec.engine.model.proofs.probe.ProbeLog.row_invariant", False)
    directory = save_tiny_model("llama", tmp_path)
    settings = {"model": str(directory), "device": "cpu", "num_blocks": 16, "self_test": self_test}
    assert not ModelRunner.load(EngineSettings.model_validate(settings)).row_invariant
    with pytest.raises(ModelLoadError, match=r"not row-invariant here.*install specdec from a wheel"):
        ModelRunner.load(EngineSettings.model_validate({**settings, "deterministic": True}))
