"""libibverbs as Debian's headers and library have it."""

from __future__ import annotations

import pytest

from tests.abi.conftest import Headers, compare_enums, compare_structs, exported, missing_from, need


@pytest.fixture(scope="session")
def verbs(debian, tmp_path_factory):
    need(debian / "include/infiniband/verbs.h")
    return Headers(tmp_path_factory.mktemp("verbs"), [debian / "include"], "#include <infiniband/verbs.h>")


def test_numbers_and_layouts_are_those_of_the_header(verbs, declared):
    enums = ["CompletionStatus", "WorkOpcode", "QueuePairState", "Access", "AttributeMask", "PortState"]
    assert compare_enums(verbs, declared, "IBV", enums) == set()
    compare_structs(verbs, declared["verbs_structs"], "struct")
    constants = {name: value for name, value in declared["constants"].items() if name.startswith("IBV")}
    assert verbs.values(list(constants)) == constants


def test_the_library_exports_every_entry(debian, declared):
    library = need(debian / "lib/x86_64-linux-gnu/libibverbs.so.1")
    assert missing_from(library, declared["verbs"]) == (set(), set())


def test_what_is_fast_is_not_exported_and_goes_through_the_context(debian):
    has = exported(need(debian / "lib/x86_64-linux-gnu/libibverbs.so.1"))
    assert not {"ibv_post_send", "ibv_post_recv", "ibv_poll_cq", "ibv_req_notify_cq"} & has
