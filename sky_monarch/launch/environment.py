"""The one place that reads the environment of the launching process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sky_monarch.errors import ConfigError

__all__ = ["agent_environment", "caller_value", "job_environment", "state_dir"]

_STATE_DIR = "SKY_MONARCH_STATE_DIR"
#: What of our own variables is for every process of a run; only tests set the second.
_OURS = frozenset({_STATE_DIR, "SKY_MONARCH_TEST_DOCTOR_TREES"})

#: What a rank is told about itself. An `up` typed inside another run must not hand these on.
_IDENTITY = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NUM_REPLICA_GROUPS",
        "RANK",
        "REPLICA_GROUP_ID",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHFT_LIGHTHOUSE",
        "WORLD_SIZE",
    }
)

#: What our own processes need to start; all else that the user exported (tokens among it) stays out of them.
_KEPT = frozenset(
    {
        "CONDA_PREFIX",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LOGNAME",
        "PATH",
        "RUST_BACKTRACE",
        "RUST_LOG",
        "SHELL",
        "TERM",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)
_KEPT_PREFIXES = ("LC_", "PYTHON", "XDG_", "ASAN_", "LSAN_", "TSAN_", "COVERAGE_", "LLVM_PROFILE_")


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where runs live: ``SKY_MONARCH_STATE_DIR``, else the platform's state folder of the user.

    Raises:
        ConfigError: The name of the folder is no text, so no file could hold it.
    """
    chosen = (os.environ if environ is None else environ).get(_STATE_DIR)
    if chosen:
        if any("\udc80" <= character <= "\udcff" for character in chosen):  # bytes that are no text
            raise ConfigError(f"{_STATE_DIR} is not valid UTF-8: {os.fsencode(chosen)!r}")
        return Path(os.path.abspath(Path(chosen).expanduser()))  # noqa: PTH100  (resolve() would follow links)
    import platformdirs

    return Path(platformdirs.user_state_dir("sky-monarch", appauthor=False))


def caller_value(name: str) -> str | None:
    """Value of one variable of the launching process; None where it is not set."""
    return os.environ.get(name)


def _without_identity(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in environ.items()
        if key not in _IDENTITY and (key in _OURS or not key.startswith("SKY_MONARCH_"))
    }


def job_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The shell's environment as ranks and ``setup`` inherit it, without what another run said about a rank.

    Where no virtual environment is active, the folder of this interpreter comes first in ``PATH``, so that
    ``python`` in a job means the one sky-monarch is installed in.
    """
    env = _without_identity(os.environ if environ is None else environ)
    if not env.get("VIRTUAL_ENV") and not env.get("CONDA_PREFIX"):
        own = str(Path(sys.executable).parent)
        folders = [folder for folder in env.get("PATH", os.defpath).split(os.pathsep) if folder != own]
        env["PATH"] = os.pathsep.join([own, *folders])
    return env


def agent_environment(run_id: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What agent, controller and lighthouse see: enough to start Python, the run's mark, and no secrets."""
    source = os.environ if environ is None else environ
    env = {
        key: value
        for key, value in _without_identity(source).items()
        if key in _KEPT or key in _OURS or key.startswith(_KEPT_PREFIXES)
    }
    env["SKY_MONARCH_RUN_ID"] = run_id
    return env
