"""The pages that are generated are those that the code would generate now; every page is in the navigation."""

from __future__ import annotations

import re
from pathlib import Path

from sky_monarch.cli.reference import cli_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_cli_page_is_current_and_has_what_a_user_types() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")

    assert page == cli_page(), "run: python -m sky_monarch.cli.reference > docs/reference/cli.md"
    assert "* `-h, --help`: Show this message and exit." in page
    assert "## `sky-monarch scale`" in page
    for hidden in ("agent", "controller", "lighthouse"):
        assert f"## `sky-monarch {hidden}`" not in page, "nobody types that"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page


_PLACES = {"E": "e2e", "I": "integration", "U": "unit", "N": "net", "S": "slow"}
_ROW = re.compile(r"^\| (H\d\d) \|.*\| (.*) \|$", re.MULTILINE)


def missing_tests(cell: str) -> list[str]:
    """What a row of the table names and nobody has: ``I/file: test…``, more tests of it, a Rust file likewise."""
    missing, text = [], ""
    for name in re.findall(r"`([^`]+)`", cell):
        place, _, test = name.partition(": ")
        if re.fullmatch(r"[EIUNS]/\w+", place):
            path = ROOT / "tests" / _PLACES[place[0]] / f"test_{place[2:]}.py"
        elif place.startswith("rust_core/"):
            path = ROOT / place
        elif re.fullmatch(r"[a-z_…]+(\[.*\])?", name):
            path, test = None, name
        else:
            continue
        if path is not None:
            if not path.is_file():
                missing.append(name)
                continue
            text = path.read_text(encoding="utf-8")
        parts = filter(None, test.partition("[")[0].split("…"))
        if not all(re.search(rf"(def|fn) \w*{re.escape(part)}", text) for part in parts):
            missing.append(name)
    return missing


def test_every_test_that_the_table_of_cases_names_is_there() -> None:
    rows = _ROW.findall((ROOT / "tests/README.md").read_text(encoding="utf-8"))
    assert len(rows) >= 40
    missing = {row: found for row, cell in rows if (found := missing_tests(cell))}
    assert missing == {}
    assert missing_tests(
        "`I/recovery: no_such_test…`, `I/nowhere`, `rust_core/tests/agent/door.rs: a_stranger…`"
    ) == [
        "I/recovery: no_such_test…",
        "I/nowhere",
    ]
