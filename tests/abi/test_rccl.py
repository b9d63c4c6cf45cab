"""RCCL as AMD's own bindings (2.30.4) have it."""

from __future__ import annotations

import re
import sys

import pytest

from tests.abi.conftest import ORACLES, need
from tests.abi.test_hip import size_of


@pytest.fixture(scope="session")
def rccl():
    need(ORACLES / "bindings/rocm/bindings/rccl.pyi")
    sys.path.insert(0, str(ORACLES / "bindings"))
    try:
        from rocm.bindings import rccl
    except ImportError as refused:
        pytest.skip(f"AMD's bindings do not load into this Python: {refused}")
    return rccl


def test_numbers_are_rccls(rccl, declared):
    members = {}
    for name in dir(rccl):
        members.update(getattr(getattr(rccl, name), "__members__", {}))
    for enum in ("CclResult", "DataType", "ReduceOp"):
        for value, (name,) in declared["enums"][enum]:
            assert int(members[name]) == value, name


def test_the_configuration_is_the_beginning_of_rccls_longer_one(rccl, declared):
    unique, config = declared["ccl_structs"]
    assert size_of(rccl.ncclUniqueId) == unique["size"] == 128
    assert size_of(rccl.ncclConfig_v22800) == 96 > config["size"]


def test_every_entry_is_one_that_rccl_declares(rccl, declared):
    text = (ORACLES / "bindings/rocm/bindings/cyrccl.pxd").read_text()
    for entry in declared["ccl"]:
        (name,) = entry["symbols"]
        assert re.search(rf"\b{name}\(", text), name
