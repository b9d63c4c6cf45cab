"""The wheel of the package that runs: pip takes it, and what it installs is what runs here."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sky_monarch
from sky_monarch.errors import ConfigError
from sky_monarch.launch.wheel import Wheel, find_wheel

PACKAGE = Path(sky_monarch.__file__).parent
VERSION = sky_monarch.__version__


#: As much of a library for Linux on x86-64 as is looked at. The real one is large.
CORE = b"\x7fELF" + bytes(14) + (0x3E).to_bytes(2, "little") + bytes(44)


@pytest.fixture(scope="module")
def package(module_path: Path) -> Path:
    """A checkout of ours with next to nothing for a core."""
    left_out = shutil.ignore_patterns("__pycache__", "_core.abi3.so")
    folder = shutil.copytree(PACKAGE, module_path / "sky_monarch", ignore=left_out)
    shutil.copy(PACKAGE.parent / "pyproject.toml", module_path)
    (folder / "_core.abi3.so").write_bytes(CORE)
    (folder / "__pycache__").mkdir()
    for junk in ("__pycache__/a.pyc", "launch/.host.sh.swp", "up.py.orig", "notes.txt", "_core.so"):
        (folder / junk).write_text("junk")
    return folder


@pytest.fixture(scope="module")
def wheel(package: Path) -> Wheel:
    return find_wheel(None, package=package, version=VERSION)


def refusal(given: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        find_wheel(str(given), package=PACKAGE, version=VERSION)
    return f"{caught.value} / {caught.value.hint}"


def tampered(wheel: Wheel, folder: Path, name: str, change) -> Path:
    """The wheel under another name, its members passed through ``change(name, data) -> data | None``."""
    good = wheel.write(folder)
    path = folder / name
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.namelist():
            if (data := change(entry, source.read(entry))) is not None:
                target.writestr(entry, data)
    if good != path:
        good.unlink()
    return path


def test_equal_files_give_an_equal_wheel_whose_name_says_what_it_is_for(wheel, package, tmp_path):
    again = find_wheel(None, package=package, version=VERSION)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    assert wheel.write(tmp_path / "a").read_bytes() == again.write(tmp_path / "b").read_bytes()
    assert wheel.ship_id == again.ship_id
    assert wheel.file_name == f"sky_monarch-{VERSION}-cp311-abi3-linux_x86_64.whl"


def test_what_a_build_leaves_in_a_checkout_is_no_installation(wheel, package, monkeypatch):
    about = package.parent / "sky_monarch.egg-info"
    about.mkdir()
    (about / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: sky-monarch\nVersion: {VERSION}\n")
    (about / "SOURCES.txt").write_text("sky_monarch/__init__.py\nsky_monarch/errors.py\n")
    monkeypatch.syspath_prepend(package.parent)

    assert find_wheel(None, package=package, version=VERSION).ship_id == wheel.ship_id


def test_it_says_what_a_head_has_to_get_from_the_package_index(wheel, package, tmp_path):
    with zipfile.ZipFile(wheel.write(tmp_path)) as archive:
        about = archive.read(f"sky_monarch-{VERSION}.dist-info/METADATA").decode()
    assert "Requires-Dist: pydantic>=" in about
    assert "torch" not in about

    alone = shutil.copytree(package, tmp_path / "sky_monarch")
    with pytest.raises(ConfigError, match="does not say what sky-monarch needs"):
        find_wheel(None, package=alone, version=VERSION)


def test_it_holds_the_package_with_its_data_and_nothing_that_lies_beside_it(wheel, tmp_path):
    with zipfile.ZipFile(wheel.write(tmp_path)) as archive:
        names = archive.namelist()
        record = archive.read(names[-1]).decode().splitlines()
        for line in record[:-1]:
            name, digest, size = line.rsplit(",", 2)
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data))
    assert names[-1] == f"sky_monarch-{VERSION}.dist-info/RECORD"
    assert [line.rsplit(",", 2)[0] for line in record] == names
    for needed in (
        "_core.abi3.so",
        "py.typed",
        "launch/host.sh",
        "launch/offers.json",
        "task_templates/slurm.yaml",
    ):
        assert f"sky_monarch/{needed}" in names
    assert not [
        name
        for name in names
        if name.endswith((".pyc", ".orig", ".swp", ".txt", "/_core.so")) and "info/" not in name
    ]


@pytest.mark.slow
def test_pip_installs_it_and_what_it_installed_ships_the_very_same_wheel(wheel, tmp_path):
    path = wheel.write(tmp_path)  # with the real core it is installed and run by `I/host_setup`
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=100)
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", path)
    code = (
        "import json, sys, pathlib, sky_monarch\n"
        "from sky_monarch.launch.wheel import find_wheel\n"
        "package = pathlib.Path(sky_monarch.__file__).parent\n"
        "found = find_wheel(None, package=package, version=sky_monarch.__version__)\n"
        "(out := pathlib.Path('again')).mkdir()\n"
        "print(json.dumps([str(package), found.ship_id, str(found.write(out))]))\n"
    )
    package, ship_id, again = json.loads(run("-c", code))

    assert package.startswith(str(tmp_path / "venv"))
    assert ship_id == wheel.ship_id
    assert (tmp_path / again).read_bytes() == path.read_bytes()
    assert (
        run("-c", "from importlib.metadata import version as v; print(v('sky-monarch'))").strip() == VERSION
    )
    assert (tmp_path / "venv/bin/sky-monarch").exists()


@pytest.mark.parametrize("core", [None, b"\xcf\xfa\xed\xfe" + b"\0" * 60, b"\x7fELF" + b"\0" * 60])
def test_without_a_core_for_linux_it_is_refused_with_the_fix(tmp_path, core):
    package = tmp_path / "sky_monarch"
    package.mkdir()
    (package / "__init__.py").touch()
    if core is not None:
        (package / "_core.abi3.so").write_bytes(core)

    with pytest.raises(ConfigError, match="compiled core for Linux") as caught:
        find_wheel(None, package=package, version=VERSION)

    assert "SKY_MONARCH_WHEEL" in (caught.value.hint or "")


def test_a_wheel_that_was_named_is_taken_as_it_is(wheel, tmp_path):
    given = tampered(
        wheel, tmp_path, f"sky_monarch-{VERSION}-cp311-abi3-manylinux_2_28_x86_64.whl", lambda _, data: data
    )
    (tmp_path / "out").mkdir()

    found = find_wheel(str(given), package=Path("/nowhere"), version=VERSION)

    assert found.file_name == given.name
    assert found.write(tmp_path / "out").read_bytes() == given.read_bytes()
    assert found.ship_id.startswith(f"{VERSION}-")
    assert found.ship_id != wheel.ship_id, "another file is set up beside the first, not in its place"


def test_a_wheel_of_another_version_is_refused_with_both_versions_and_the_remedy(wheel, tmp_path):
    def other(name: str, data: bytes) -> bytes:
        return data.replace(VERSION.encode(), b"9.9.9") if name.endswith("METADATA") else data

    # H56: also where only what is inside differs.
    given = tampered(wheel, tmp_path, wheel.file_name.replace(".whl", ".bak"), other).rename(
        tmp_path / wheel.file_name
    )
    said = refusal(given)

    assert said.count("\n") == 0
    assert "9.9.9" in said
    assert VERSION in said
    assert "pip install sky-monarch==9.9.9" in said


def test_what_is_no_wheel_for_hosts_is_refused_by_what_it_is(wheel, tmp_path):
    (text := tmp_path / f"sky_monarch-{VERSION}-cp311-abi3-linux_x86_64.whl").write_text("no zip")
    mac = tmp_path / f"sky_monarch-{VERSION}-cp311-abi3-macosx_11_0_arm64.whl"

    assert "cannot be read as a wheel" in refusal(text)
    assert "cannot be read as a wheel" in refusal(tmp_path / "sky_monarch-1-py3-none-linux_x86_64.whl")
    assert "macosx_11_0_arm64, hosts run Linux" in refusal(mac)
    assert "not named as a wheel" in refusal(tmp_path / "torch-2.0-cp311-abi3-linux_x86_64.whl")
    (tmp_path / "c").mkdir()
    bare = tampered(
        wheel,
        tmp_path / "c",
        f"sky_monarch-{VERSION}-py3-none-linux_x86_64.whl",
        lambda name, data: None if name.endswith(".so") else data,
    )
    assert "no compiled core in it" in refusal(bare)
