"""A host's setup, by bash as SkyPilot runs it: the real script, the real wheel, no network, a home of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sky_monarch
from sky_monarch.launch.bootstrap import HEAD_RUN, HEAD_SETUP, HOST_SCRIPT, RUN, SETUP
from sky_monarch.launch.wheel import Wheel, find_wheel

VERSION = sky_monarch.__version__
#: The interpreter beneath our environment: without torch, without us.
PLAIN = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")


class Host:
    """A home folder with what SkyPilot would have put there."""

    def __init__(self, home: Path, wheel: Wheel | Path, *, python: Path | None = PLAIN) -> None:
        self.home = home
        self.ship_id = f"{VERSION}-0123456789ab"
        ship = home / ".sky-monarch/ship" / self.ship_id
        ship.mkdir(parents=True)
        if isinstance(wheel, Wheel):
            wheel.write(ship)
        else:
            shutil.copy(wheel, ship)
        shutil.copyfile(HOST_SCRIPT, ship / HOST_SCRIPT.name)
        self.workdir = home / "sky_workdir"
        # As in a checkout of ours: what lies in the working folder must not come before what was shipped.
        (self.workdir / "sky_monarch").mkdir(parents=True)
        (self.workdir / "sky_monarch/__init__.py").write_text(
            "raise ImportError('from the working folder')\n"
        )
        self.path = home / "bin"
        self.path.mkdir()
        for tool in ("bash", "sh", "mkdir", "rm", "touch", "chmod", "cat", "uname", "flock"):
            if found := shutil.which(tool):
                (self.path / tool).symlink_to(found)
        if python is not None:
            (self.path / "python3").symlink_to(python)

    @property
    def venv(self) -> Path:
        return self.home / ".sky-monarch" / self.ship_id

    def bash(self, text: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text],
            cwd=self.workdir,
            env={"HOME": str(self.home), "PATH": str(self.path), "SKY_MONARCH_SHIP": self.ship_id, **env},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def python(self, code: str) -> str:
        done = subprocess.run(
            [self.venv / "bin/python", "-c", code],
            cwd=self.home,
            env={},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(module_path: Path) -> Path:
    """Written once: it is large."""
    (folder := module_path / "wheel").mkdir()
    return find_wheel(None, package=Path(sky_monarch.__file__).parent, version=VERSION).write(folder)


@pytest.fixture(scope="module")
def ready(module_path: Path, wheel: Path) -> Host:
    """A host that was set up once."""
    (home := module_path / "home").mkdir()
    host = Host(home, wheel)
    done = host.bash(SETUP)
    assert done.returncode == 0, done.stderr
    assert "the job's setup has to install it" in done.stderr, "it has no torch, and is told so"
    assert f"{VERSION} is set up" in done.stderr
    return host


def test_what_is_installed_is_what_was_shipped(ready: Host) -> None:
    code = "import sky_monarch, sky_monarch._core; print(sky_monarch.__version__, sky_monarch.__file__)"

    version, file = ready.python(code).split()

    assert version == VERSION
    assert file.startswith(str(ready.venv))


def test_a_second_setup_finds_it_there_and_costs_nothing(ready: Host) -> None:
    before = (ready.venv / "ready").stat().st_mtime_ns

    done = ready.bash(SETUP)

    assert (done.returncode, done.stderr) == (0, "")
    assert (ready.venv / "ready").stat().st_mtime_ns == before


def test_what_the_job_installs_lands_in_the_environment_not_in_the_hosts_python(ready: Host) -> None:
    done = ready.bash(f'PATH="{ready.venv}/bin:$PATH" pip --version')

    assert done.returncode == 0, done.stderr
    where = ready.bash(
        f'"{ready.venv}/bin/python" -c "import sysconfig; print(sysconfig.get_path(\'purelib\'))"'
    )
    assert where.stdout.startswith(str(ready.venv))
    assert "#!/bin/sh" in (ready.venv / "bin/pip").read_text()


def test_the_agent_runs_from_the_environment_and_what_lies_in_the_working_folder_is_not_it(
    ready: Host,
) -> None:
    # It is told of no run: it must say so itself, and the script must have become it.
    done = ready.bash(RUN, SKY_MONARCH_FOLDER="demo-1/demo-h0-a2")

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error:"), (
        "that is how the agent speaks; the script says sky-monarch: first"
    )
    assert "from the working folder" not in done.stderr


def test_without_its_setup_or_its_folder_an_agent_is_not_started(
    tmp_path: Path, wheel: Path, ready: Host
) -> None:
    done = Host(tmp_path, wheel).bash(RUN, SKY_MONARCH_FOLDER="demo-1/demo-h0-a2")
    assert done.returncode == 1
    assert "sky-monarch is not set up on this host" in done.stderr

    nameless = ready.bash(RUN)
    assert nameless.returncode != 0
    assert "SKY_MONARCH_FOLDER" in nameless.stderr


def test_a_host_without_a_python_that_is_new_enough_says_which_one_it_has(
    tmp_path: Path, wheel: Wheel
) -> None:
    host = Host(tmp_path, wheel, python=None)
    none = host.bash(SETUP)
    assert none.returncode == 1
    assert "no Python 3.11 or newer" in none.stderr

    old = host.path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = host.bash(SETUP)
    assert done.returncode == 1
    assert "no Python 3.11 or newer (Python 3.9.2)" in done.stderr
    assert "resources.image" in done.stderr, "what to do about it"
    assert not host.venv.exists()


def test_a_host_without_pip_says_how_to_get_it(tmp_path: Path, wheel: Path) -> None:
    host = Host(tmp_path, wheel)
    hide = (
        "import sys\nclass Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('pip', 'ensurepip'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide/sitecustomize.py").write_text(hide)

    done = host.bash(SETUP, PYTHONPATH=str(tmp_path / "hide"))

    assert done.returncode == 1
    assert "has no pip" in done.stderr
    assert "apt-get install python3-pip" in done.stderr


def test_versions_are_compared_before_anything_starts(ready: Host) -> None:
    # An environment that another run has left, under the name of what this one ships.
    other = "9.9.9-0123456789ab"
    (ready.home / ".sky-monarch" / other).symlink_to(ready.venv)
    (ready.home / ".sky-monarch/ship" / other).symlink_to(ready.home / ".sky-monarch/ship" / ready.ship_id)

    done = ready.bash(SETUP, SKY_MONARCH_SHIP=other)

    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert VERSION in line, "H56: both versions in one line"
    assert "9.9.9" in line
    assert "hint:" in done.stderr


def test_a_core_that_does_not_load_here_is_told_as_that(tmp_path: Path) -> None:
    (package := tmp_path / "sky_monarch").mkdir()
    (package / "__init__.py").write_text(f"__version__ = {VERSION!r}\n")
    (package / "_core.abi3.so").write_bytes(b"\x7fELF" + bytes(14) + (0x3E).to_bytes(2, "little") + bytes(44))
    shutil.copy(Path(sky_monarch.__file__).parents[1] / "pyproject.toml", tmp_path)
    (home := tmp_path / "home").mkdir()
    host = Host(home, find_wheel(None, package=package, version=VERSION))

    done = host.bash(SETUP)

    assert done.returncode == 1
    assert "does not load on this host" in done.stderr
    assert "SKY_MONARCH_WHEEL" in done.stderr
    assert not (host.venv / "ready").exists(), "so that no agent starts"


def test_the_hosts_own_torch_is_seen_and_never_replaced(tmp_path: Path, wheel: Path) -> None:
    # Our own environment stands for an image whose Python is a virtual environment with torch in it.
    host = Host(tmp_path, wheel, python=None)

    done = host.bash(SETUP, PATH=f"{Path(sys.executable).parent}:{host.path}")

    assert done.returncode == 0, done.stderr
    assert "installing" not in done.stderr, "torchft is there as well"
    found = host.python(
        "import importlib.util as u, sky_monarch; print(u.find_spec('torch').origin, sky_monarch.__file__)"
    ).split()
    assert found[0].startswith(sys.prefix)
    assert found[1].startswith(str(host.venv)), "the host's own sky-monarch does not come first"


def test_torchft_that_cannot_be_had_is_a_warning_and_torch_stays_pinned(tmp_path: Path, wheel: Path) -> None:
    host = Host(tmp_path, wheel)
    (site := tmp_path / "site").mkdir()
    (site / "torch").mkdir()
    (site / "torch/__init__.py").touch()
    (site / "torch-2.9.0+rocm7.2.dist-info").mkdir()
    (site / "torch-2.9.0+rocm7.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0+rocm7.2\n"
    )

    done = host.bash(SETUP, PYTHONPATH=str(site), PIP_NO_INDEX="1")

    assert done.returncode == 0, done.stderr
    assert (host.venv / "torch.txt").read_text() == "torch==2.9.0+rocm7.2\n"
    assert "warning: torchft==0.2.* was not installed" in done.stderr


def test_the_script_asks_for_what_the_package_asks_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (torchft,) = (one for one in project["optional-dependencies"]["train"] if one.startswith("torchft"))

    assert f"needed='{torchft}'" in HOST_SCRIPT.read_text()
    assert project["requires-python"] == ">=3.11"
    assert os.access(HOST_SCRIPT, os.R_OK)


@pytest.mark.slow
def test_a_head_gets_what_the_controller_needs_in_an_environment_of_its_own(
    tmp_path: Path, wheel: Path
) -> None:
    host = Host(tmp_path, wheel, python=None)
    has_all = host.path / "python3"  # ours, which has it all: no index is asked
    has_all.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    has_all.chmod(0o755)

    done = host.bash(HEAD_SETUP, PIP_NO_INDEX="1")

    assert done.returncode == 0, done.stderr
    assert f"{VERSION} is set up" in done.stderr
    assert "torchft" not in done.stderr
    assert not host.venv.exists(), "hosts that share this home set up theirs"
    code = "import sky_monarch.controller.api, sky_monarch; print(sky_monarch.__file__)"
    venv = host.venv.with_name(f"{host.venv.name}-head")
    found = subprocess.run(
        [venv / "bin/python", "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(venv))
    began = host.bash(HEAD_RUN, SKY_MONARCH_FOLDER="demo-1/demo-head-a1")
    assert began.returncode == 2
    assert "SKY_MONARCH_HOST is not set" in began.stderr
    assert "sky-monarch is not set up on this host" in host.bash(RUN, SKY_MONARCH_FOLDER="x").stderr


@pytest.mark.slow
def test_a_head_without_an_index_for_what_it_needs_says_so(tmp_path: Path, wheel: Path) -> None:
    done = Host(tmp_path, wheel).bash(HEAD_SETUP, PIP_NO_INDEX="1", PIP_IGNORE_INSTALLED="1")

    assert done.returncode == 1
    assert "the head needs a package index" in done.stderr
