"""Name the extra that installs a missing module. It imports little: the command starts with it."""

from __future__ import annotations

import re
from importlib import metadata

_REQUIREMENT = re.compile(r"""([\w.-]+).*\bextra == ["']([\w-]+)""")


def missing_extra(error: BaseException) -> str | None:
    """Return a message that names the missing extra if an import failed for lack of one; otherwise None."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    try:
        requirements = metadata.requires("specdec") or []
    except metadata.PackageNotFoundError:
        return None
    wanted = error.name.partition(".")[0].replace("_", "-")
    found = (_REQUIREMENT.match(line) for line in requirements)
    extra = next((one[2] for one in found if one and one[1] == wanted), None)
    return None if extra is None else f"this needs {wanted}: pip install 'specdec[{extra}]'"
