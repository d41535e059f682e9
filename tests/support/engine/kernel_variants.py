"""The builds of the native kernels that this machine can run, for tests of each."""

import platform

from specdec.engine.native.variants import cpu_features, missing_features, variants_for


def runnable_variants() -> list[str]:
    """Names of the variants, the fastest first."""
    return [v.name for v in variants_for(platform.machine()) if not missing_features(v, cpu_features())]
