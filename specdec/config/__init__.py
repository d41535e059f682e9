"""The settings of targets, drafts and coordinators, read from flags, SPECDEC_* variables, a file and defaults.

    python -m specdec.target_service --model models/target --num-threads 2
    SPECDEC_TARGET_MODEL=models/target python -m specdec.target_service
    python -m specdec.target_service --config target.yaml

A flag wins over the environment, the environment over the file, the file over the default.
"""

from specdec.config.coordinator import CoordinatorSettings
from specdec.config.draft import DraftSettings
from specdec.config.replica import ReplicaSettings
from specdec.config.sources import load_settings, settings_or_exit
from specdec.config.target import TargetSettings

__all__ = [
    "CoordinatorSettings",
    "DraftSettings",
    "ReplicaSettings",
    "TargetSettings",
    "load_settings",
    "settings_or_exit",
]
