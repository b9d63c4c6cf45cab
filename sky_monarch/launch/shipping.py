"""What is sent to every host: the wheel of this installation, and a copy of the working folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sky_monarch.errors import LaunchError
from sky_monarch.launch.bootstrap import HOST_SCRIPT
from sky_monarch.launch.wheel import Wheel, find_wheel
from sky_monarch.launch.workdir import Listing, list_workdir, stage_workdir

__all__ = ["FOLDER", "Shipment", "find_shipment"]

FOLDER = "ship"
"""What is sent, in the run's folder: removed when the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """What is sent, known before anything is copied.

    Attributes:
        wheel: Of this installation.
        workdir: What of the working folder.
    """

    wheel: Wheel
    workdir: Listing

    @staticmethod
    def files_of(run_dir: Path) -> Path:
        """Where the wheel and ``host.sh`` of a run are."""
        return run_dir / FOLDER / "host"

    @staticmethod
    def workdir_of(run_dir: Path) -> Path:
        """Where the copy of the working folder of a run is."""
        return run_dir / FOLDER / "workdir"

    def to_json(self, run_dir: Path) -> dict[str, Any]:
        """``ship`` of ``provisioner.json``."""
        return {
            "wheel": str(self.files_of(run_dir) / self.wheel.file_name),
            "ship_id": self.wheel.ship_id,
            "workdir": str(self.workdir_of(run_dir)),
            "files": len(self.workdir.files),
            "bytes": self.workdir.size_bytes,
        }

    def summary(self) -> dict[str, Any]:
        """What is shown before anything is started, as JSON values."""
        return {
            "wheel": self.wheel.file_name,
            "ship_id": self.wheel.ship_id,
            **self.workdir.summary(),
        }

    def stage(self, run_dir: Path) -> None:
        """Put everything into the run's folder.

        Raises:
            LaunchError: Something cannot be read or written.
        """
        files = self.files_of(run_dir)
        try:
            files.mkdir(mode=0o700, parents=True)
            self.wheel.write(files)
            shutil.copyfile(HOST_SCRIPT, files / HOST_SCRIPT.name)
            # Beside these two there is nothing that any rule of SkyPilot could leave out.
            (files / ".skyignore").touch()
        except OSError as error:
            raise LaunchError(
                f"the wheel could not be written to {files}: {error.strerror or error}"
            ) from error
        stage_workdir(self.workdir, self.workdir_of(run_dir))


def find_shipment(workdir: Path, *, state: Path, given_wheel: str | None, version: str) -> Shipment:
    """Look at what would be shipped; write nothing.

    Args:
        workdir: The working folder.
        state: Where runs are: never a part of it.
        given_wheel: A wheel that is taken in place of this installation.
        version: Of this installation.

    Raises:
        ConfigError: The working folder, or the given wheel, cannot be used; or there is nothing to ship: no compiled
            core for Linux.
    """
    wheel = find_wheel(given_wheel, package=Path(__file__).parents[1], version=version)
    return Shipment(wheel=wheel, workdir=list_workdir(workdir, without=state))
