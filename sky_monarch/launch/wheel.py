"""The wheel of the very package that runs: what hosts install is what launched them.

It is put together from the files of this installation, never built: that needs no toolchain and no network, and the
compiled core in it is the one in use here. Equal files give an equal wheel, byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sky_monarch.errors import ConfigError

__all__ = ["Wheel", "find_wheel", "require_core_to_ship"]

GIVEN = "SKY_MONARCH_WHEEL"
"""Names a wheel that is shipped in place of this installation."""

_DISTRIBUTION = "sky-monarch"
_PACKAGE = "sky_monarch"
_CORE = "_core.abi3.so"
_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}  # e_machine of ELF
_SUFFIXES = frozenset((".py", ".pyi", ".json", ".sh", ".yaml", ".typed"))
_NAME = re.compile(r"sky_monarch-(?P<version>[^-]+)(?:-\d[^-]*)?-[^-]+-[^-]+-(?P<platform>[^-]+)\.whl")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first day that a zip file can hold
_FIX = "make one on Linux (`make wheel`, or `pip wheel --no-deps sky-monarch`) and name it in " + GIVEN
_MOST_METADATA_BYTES = 1 << 20

#: What pip wrote about the installation itself: no part of the wheel that it came from.
_INSTALLERS = frozenset(("INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "RECORD.jws", "RECORD.p7s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that can be written.

    Attributes:
        file_name: Its name, which says what it is for.
        version: Of the package in it.
        digest: Twelve hexadecimal digits for its content.
        source: Where it comes from: a wheel, or the folder of the package.
        files: ``(path in the wheel, file or content)`` in order; empty where ``source`` is a wheel.
    """

    file_name: str
    version: str
    digest: str
    source: Path
    files: tuple[tuple[str, Path | bytes], ...] = ()

    @property
    def ship_id(self) -> str:
        """Names what is shipped, on every host: ``0.1.0-3f2a9c1b77d0``."""
        return f"{self.version}-{self.digest}"

    def write(self, folder: Path) -> Path:
        """Write it into a folder.

        Raises:
            OSError: It cannot be read or written.
        """
        target = folder / self.file_name
        if not self.files:
            target.write_bytes(self.source.read_bytes())
            return target
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, content in self.files:
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
                archive.writestr(entry, content if isinstance(content, bytes) else content.read_bytes())
        return target


def find_wheel(given: str | None, *, package: Path, version: str) -> Wheel:
    """What is to be shipped.

    Args:
        given: Path of a wheel that is taken as it is; None: this installation.
        package: Folder of the package that runs.
        version: Its version.

    Raises:
        ConfigError: The given wheel is none of this version for Linux; or there is none, and this installation has no
            compiled core for Linux.
    """
    if given:
        return _given(Path(given).expanduser(), version)
    machine = require_core_to_ship(package)
    installed = _installed(package)
    info = f"{_PACKAGE}-{version}.dist-info"
    if installed is not None and installed.version == version:
        files: dict[str, Path | bytes] = dict(_recorded(installed, info))
        tags = _tags(installed.read_text("WHEEL") or "")
    else:
        files = dict(_tree(package))
        files |= _minimal(info, version, _required(package.parent / "pyproject.toml"))
        tags = []
    tags = tags or [("cp311", "abi3", f"linux_{machine}")]
    files[f"{info}/WHEEL"] = _about(tags)
    ordered = dict(sorted(files.items(), key=lambda entry: (".dist-info/" in entry[0], entry[0])))
    record = _record(ordered, f"{info}/RECORD")
    ordered[f"{info}/RECORD"] = record
    return Wheel(
        file_name=f"{_PACKAGE}-{version}-{_name_of(tags)}.whl",
        version=version,
        digest=hashlib.sha256(record).hexdigest()[:12],
        source=package,
        files=tuple(ordered.items()),
    )


def require_core_to_ship(package: Path) -> str:
    """For which processors the compiled core of an installation is. Reads a few bytes.

    Raises:
        ConfigError: It has none for Linux.
    """
    machine = _machine(package / _CORE)
    if machine is None:
        raise ConfigError(
            f"hosts need the compiled core for Linux, and {package} has none to ship", hint=_FIX
        )
    return machine


def _machine(core: Path) -> str | None:
    """For which processors a file was linked; None where it is no library for Linux."""
    try:
        with core.open("rb") as file:
            head = file.read(20)
    except OSError:
        return None
    return _MACHINES.get(int.from_bytes(head[18:20], "little")) if head[:4] == b"\x7fELF" else None


def _installed(package: Path) -> metadata.Distribution | None:
    """The distribution that these very files belong to; None for a checkout, and for an editable installation."""
    try:
        found = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    if found.read_text("RECORD") is None:
        return None  # an egg-info: a build leaves it in a checkout, and it lists the sources
    for file in found.files or ():
        if file.parts == (_PACKAGE, "__init__.py"):
            here = Path(str(found.locate_file(file))).resolve()
            return found if here == (package / "__init__.py").resolve() else None
    return None


def _recorded(found: metadata.Distribution, info: str) -> Iterator[tuple[str, Path]]:
    """The package and its metadata, as RECORD lists them."""
    for file in found.files or ():
        parts = file.parts
        own = parts[0] == _PACKAGE and "__pycache__" not in parts
        about = parts[0] == info and parts[-1] not in _INSTALLERS
        if (own and file.suffix != ".pyc") or about:
            yield file.as_posix(), Path(str(found.locate_file(file)))


def _tree(package: Path) -> Iterator[tuple[str, Path]]:
    """What the package of a checkout consists of; ``task_templates`` is a link there."""
    folders = [(package, _PACKAGE)]
    while folders:
        folder, name = folders.pop()
        for path in folder.iterdir():
            if path.name.startswith(".") or path.name == "__pycache__":
                continue
            inner = f"{name}/{path.name}"
            if path.is_dir():
                folders.append((path, inner))
            elif path.suffix in _SUFFIXES or inner == f"{_PACKAGE}/{_CORE}":
                yield inner, path


def _required(project: Path) -> list[str]:
    """What the package of a checkout needs: a head, unlike other hosts, gets it from the package index.

    Raises:
        ConfigError: The file does not say.
    """
    try:
        needed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
        return [str(one) for one in needed]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{project} does not say what sky-monarch needs: {error}", hint=_FIX) from error


def _minimal(info: str, version: str, required: list[str]) -> dict[str, bytes]:
    about = f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {version}\nRequires-Python: >=3.11\n"
    about += "".join(f"Requires-Dist: {one}\n" for one in required)
    script = f"[console_scripts]\n{_DISTRIBUTION} = {_PACKAGE}.__main__:main\n"
    return {f"{info}/METADATA": about.encode(), f"{info}/entry_points.txt": script.encode()}


def _tags(text: str) -> list[tuple[str, str, str]]:
    found = re.findall(r"^Tag: ([^-\s]+)-([^-\s]+)-(\S+)$", text, re.MULTILINE)
    return [(python, abi, platform) for python, abi, platform in found]


def _about(tags: list[tuple[str, str, str]]) -> bytes:
    lines = ["Wheel-Version: 1.0", "Generator: sky-monarch", "Root-Is-Purelib: false"]
    return "\n".join([*lines, *(f"Tag: {'-'.join(tag)}" for tag in tags), ""]).encode()


def _name_of(tags: list[tuple[str, str, str]]) -> str:
    """``cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64``."""
    return "-".join(".".join(dict.fromkeys(tag[part] for tag in tags)) for part in range(3))


def _record(files: Mapping[str, Path | bytes], own: str) -> bytes:
    text = io.StringIO()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        coded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        text.write(f"{name},sha256={coded},{len(data)}\n")
    text.write(f"{own},,\n")
    return text.getvalue().encode()


def _given(path: Path, version: str) -> Wheel:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ConfigError(f"{GIVEN}: {path} is not named as a wheel of {_DISTRIBUTION} is", hint=_FIX)
    if "linux" not in match["platform"]:
        raise ConfigError(f"{GIVEN}: {path.name} is for {match['platform']}, hosts run Linux", hint=_FIX)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            about = next(name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            with archive.open(about) as file:
                text = file.read(_MOST_METADATA_BYTES).decode(errors="replace")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        what = str(error) or "it has no METADATA"
        raise ConfigError(f"{GIVEN}: {path} cannot be read as a wheel: {what}", hint=_FIX) from error
    found = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    stated = found[1] if found else "no version"
    if stated != version:
        raise ConfigError(
            f"{GIVEN} is sky-monarch {stated}, and this is {version}: a run is of one version",
            hint=f"name a wheel of {version}, or `pip install sky-monarch=={stated}` here",
        )
    if f"{_PACKAGE}/{_CORE}" not in names:
        raise ConfigError(f"{GIVEN}: {path.name} has no compiled core in it", hint=_FIX)
    return Wheel(file_name=path.name, version=version, digest=digest, source=path.resolve())
