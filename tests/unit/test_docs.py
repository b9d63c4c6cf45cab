"""The pages that are generated are those that the code would generate now; every page is in the navigation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_cli_page_is_current() -> None:
    command = [sys.executable, "-m", "typer", "sky_monarch.cli", "utils", "docs"]
    done = subprocess.run(
        [*command, "--name", "sky-monarch", "--title", "CLI"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert page.strip() == done.stdout.strip(), "run: python -m typer … > docs/reference/cli.md"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page
