"""Oracles: the vendors' own headers, bindings and libraries, beside what this tree declares of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORACLES = Path(os.environ.get("SKY_MONARCH_ABI_ORACLES", ROOT / "build/abi"))


#: Declared up to what is read of them: the library allocates them.
READ_IN_PART = {"struct ibv_context", "struct ibv_cq", "struct ibv_qp"}


def need(path: Path) -> Path:
    """Skip, and say why, where an oracle could not be had."""
    if not path.exists():
        absent = ORACLES / "absent"
        why = absent.read_text().strip().replace("\n", "; ") if absent.exists() else "run `make test-abi`"
        pytest.skip(f"no {path.name}: {why}")
    return path


@pytest.fixture(scope="session")
def declared():
    """What the Rust core declares, as its example `abi` prints it."""
    return json.loads(need(ORACLES / "declared.json").read_text())


@pytest.fixture(scope="session")
def debian():
    """Debian 12's packages, unpacked."""
    return need(ORACLES / "debian/usr")


@pytest.fixture(scope="session")
def nvidia():
    """What torch's CUDA wheels bring: headers and libraries of CUDA and NCCL."""
    return need(Path(sysconfig.get_path("purelib")) / "nvidia")


class Headers:
    """A set of C headers that is asked for values of expressions."""

    def __init__(self, folder: Path, includes: list[Path], prelude: str) -> None:
        self.folder = folder
        self.flags = [f"-I{path}" for path in includes]
        self.prelude = prelude
        done = self._gcc("-E", "-", source=prelude)
        self.words = set(re.findall(r"\w+", done.stdout))

    def _gcc(self, *arguments: str, source: str) -> subprocess.CompletedProcess[str]:
        command = ["gcc", "-x", "c", "-D__HIP_PLATFORM_AMD__=1", *self.flags, *arguments]
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def values(self, expressions: list[str]) -> dict[str, int]:
        """Each expression's value, as a C compiler has it."""
        lines = "".join(f'printf("%lld\\n", (long long)({text}));' for text in expressions)
        source = f"{self.prelude}\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {{ {lines} return 0; }}\n"
        program = self.folder / "values"
        self._gcc("-o", str(program), "-", source=source)
        out = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout
        return dict(zip(expressions, map(int, out.split()), strict=True))

    def has(self, name: str) -> bool:
        """Whether the headers speak of a name."""
        return name in self.words


def compare_enums(headers: Headers, declared, prefix: str, names: list[str]) -> set[str]:
    """Hold declared enums to the headers; returns the vendor's names that the headers do not know."""
    wanted = {
        name: value
        for enum in names
        for value, vendors in declared["enums"][enum]
        for name in vendors
        if re.match(prefix, name)
    }
    assert wanted
    known = {name: value for name, value in wanted.items() if headers.has(name)}
    assert headers.values(list(known)) == known
    return set(wanted) - set(known)


def compare_structs(headers: Headers, structs, prefix: str) -> None:
    """Hold declared sizes and offsets to the headers."""
    wanted = {}
    for struct in structs:
        for name in struct["names"]:
            if re.match(prefix, name):
                if name not in READ_IN_PART:
                    wanted[f"sizeof({name})"] = struct["size"]
                wanted.update({f"offsetof({name}, {field})": at for field, at in struct["offsets"].items()})
    assert wanted
    assert headers.values(list(wanted)) == wanted


def exported(library: Path) -> set[str]:
    """What a library exports: functions, strong or weak, whatever their version."""
    out = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[2].partition("@")[0] for line in out.splitlines() if line.split()[1] in "TWi"}


def missing_from(library: Path, table, column: int = 0) -> tuple[set[str], set[str]]:
    """Required and optional entries of a table that a library lacks."""
    has = exported(library)
    lacks = [entry for entry in table if entry["symbols"][column] not in has]
    return (
        {entry["symbols"][column] for entry in lacks if entry["required"]},
        {entry["symbols"][column] for entry in lacks if not entry["required"]},
    )
