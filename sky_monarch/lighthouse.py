"""The lighthouse's process: ``python -m sky_monarch.lighthouse CONFIG``.

Ours is in the Rust core. With ``"kind": "torchft"`` it is TorchFT's own, for comparison and as a way out.
That one asks nobody who they are: whoever reaches its port can join or disturb the quorum, and the page on
that port can end a trainer. It is bound to loopback: that keeps other hosts out, not other users here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sky_monarch.errors import ConfigError, SkyMonarchError

__all__ = ["main"]

ADDRESS_ENV = "SKY_MONARCH_LIGHTHOUSE_ADDR"

# What the core reads; everything else in the launcher's file is for other readers.
_CORE_KEYS = (
    "run_id",
    "private",
    "listen",
    "tls",
    "control",
    "state",
    "min_replicas",
    "expect",
    "join_timeout_s",
    "heartbeat_timeout_s",
    "store_argv",
    "store_path",
    "address",
    "nice",
    "kind",
)
_SHARED_KEYS = ("run_dir", "sockets", "replicas", "quorum_timeout_s", "process_group_timeout_s")
_TICK_MS = 100  # TorchFT's default


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lighthouse until it is told to end.

    Args:
        arguments: Path of its configuration; by default from the command line.

    Returns:
        The exit code: 0 after SIGTERM.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Slurm warns every process of a job: the agent is the one that leaves, and needs its lighthouse for that.
        signal.signal(number, signal.SIG_IGN)
    try:
        config = _read(sys.argv[1:] if arguments is None else arguments)
        if config.get("kind") == "torchft":
            return _run_torchft(config)
        return _run_core(config)
    except SkyMonarchError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    if len(arguments) != 1:
        raise ConfigError("usage: python -m sky_monarch.lighthouse CONFIG")
    try:
        config = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the lighthouse's configuration: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{arguments[0]} holds no JSON object")
    unknown = sorted(config.keys() - {*_CORE_KEYS, *_SHARED_KEYS})
    if unknown:
        raise ConfigError(f"{arguments[0]}: unknown key {unknown[0]!r}")
    return config


def _core_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The launcher's file in the core's words: paths follow from the run folder unless they are given."""
    core = {key: config[key] for key in _CORE_KEYS if key in config}
    if "sockets" in config and config.get("private") is not None:
        core.setdefault("control", f"unix:{config['sockets']['lighthouse']}")
    if "run_dir" in config:
        core.setdefault("state", str(Path(config["run_dir"], "lighthouse.state")))
    if "replicas" in config:
        core.setdefault("expect", config["replicas"])
    return core


def _run_core(config: Mapping[str, Any]) -> int:
    try:
        from sky_monarch import _core
    except ImportError as error:
        raise SkyMonarchError(
            f"the compiled core is missing: {error}", hint="install the wheel of this platform"
        ) from error
    return int(_core.run_lighthouse(json.dumps(_core_config(config))))


def _run_torchft(config: Mapping[str, Any]) -> int:
    address = os.environ.get(ADDRESS_ENV) or config.get("listen")
    if not address:
        raise ConfigError(f"TorchFT's lighthouse needs its address in {ADDRESS_ENV}")
    host = str(address).rpartition(":")[0]
    if host not in {"127.0.0.1", "[::1]", "localhost"}:
        raise ConfigError(f"TorchFT's lighthouse knows no authentication: {address} is not loopback")
    options = {
        "min_replicas": _number(config, "min_replicas", 1),
        "join_timeout_ms": round(_number(config, "join_timeout_s", 60.0) * 1000),
        "heartbeat_timeout_ms": round(_number(config, "heartbeat_timeout_s", 2.0) * 1000),
    }
    start = _torchft_server()
    # Blocked before its threads start, so that they inherit it and this thread alone is told.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        server = start(bind=str(address), quorum_tick_ms=_TICK_MS, **options)
    except RuntimeError as error:
        raise SkyMonarchError(f"TorchFT's lighthouse did not start at {address}: {error}") from error
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()
    return 0


def _number(config: Mapping[str, Any], key: str, default: float) -> Any:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{key} is {value!r}, not a positive number")
    return value


def _torchft_server() -> Callable[..., Any]:
    """TorchFT's server class, from its extension module alone: the package would import torch (seconds)."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec, module_from_spec

    package = find_spec("torchft")
    folders = list(package.submodule_search_locations or ()) if package else []
    spec = PathFinder.find_spec("torchft._torchft", folders) if folders else None
    if spec is None or spec.loader is None:
        raise ConfigError(
            "torchft is not installed", hint="pip install 'sky-monarch[train]', or lighthouse: sky-monarch"
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    server: Callable[..., Any] = module.LighthouseServer
    return server


if __name__ == "__main__":
    sys.exit(main())
