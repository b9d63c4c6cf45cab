"""Of what ranks on other hosts have printed: which step left out turns which test red."""

from __future__ import annotations

from tests.support.mutant import replaced

_ARCHIVE = "test_archive.py::"

ARCHIVED = [
    replaced(
        "controller/collecting.py",
        "await self._keep(process, generation, chunk)",
        "break",
        f"{_ARCHIVE}test_what_a_lost_host_printed_is_told_and_so_it_is_after_the_end",
        "it is kept while it is printed",
    ),
    replaced(
        "controller/archive.py",
        "self._load(frozenset(foreign))",
        "pass",
        f"{_ARCHIVE}test_a_controller_that_dies_goes_on_where_it_was",
        "nothing twice, nothing missing",
    ),
    replaced(
        "controller/archive.py",
        "while self._whole_cost + coming > self._limit and self._drop_one():",
        "while False:",
        f"{_ARCHIVE}test_of_a_flood_the_newest_is_kept_the_rest_is_counted_and_others_lose_nothing",
        "the limit holds",
    ),
    replaced(
        "provision/archive.py",
        "take_output(stream, logs, max_bytes=room)",
        "del stream",
        f"{_ARCHIVE}test_the_output_comes_home_before_a_head_that_is_a_cluster_goes",
        "it came home",
    ),
]
