"""What of the working folder is shipped: git's rule, in a real repository and without one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sky_monarch.errors import ConfigError, LaunchError
from sky_monarch.launch import workdir
from sky_monarch.launch.workdir import Listing, list_workdir, stage_workdir

TREE = {
    ".gitignore": "*.log\n/data/\n!keep.log\n__pycache__/\nvenv\n/deep/**/tmp\n# a comment\n\\#odd\n",
    "train.py": "print()\n",
    "a.log": "ignored",
    "keep.log": "kept",
    "#odd": "ignored",
    "data/big.bin": "ignored",
    "src/data/small.bin": "kept: the rule is for the top",
    "src/.gitignore": "*.tmp\n!/a.log\n",
    "src/a.log": "kept: the inner file decides",
    "src/b.log": "ignored",
    "src/x.tmp": "ignored",
    "src/__pycache__/a.pyc": "ignored",
    "src/venv": "ignored",
    "deep/a/b/tmp": "ignored",
    "deep/a/b/other": "kept",
    "name with blanks & ünïcode.txt": "kept",
    ".hidden": "kept",
    ".skyignore": "*.py\n",
    "src/.skyignore": "*\n",
}
KEPT = [
    ".gitignore",
    ".hidden",
    "deep/a/b/other",
    "keep.log",
    "name with blanks & ünïcode.txt",
    "src/.gitignore",
    "src/a.log",
    "src/data/small.bin",
    "train.py",
]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"},
        timeout=60,
    )
    return done.stdout


def write(folder: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def tree(tmp_path) -> Path:
    folder = write(tmp_path / "job", TREE)
    for empty in ("empty", "nested/empty/one", "data/empty", "src/venv_too"):
        (folder / empty).mkdir(parents=True)
    return folder


@pytest.fixture(params=["git", "no repository", "no git"])
def listed(request, tree, monkeypatch) -> Listing:
    """The same tree, seen in each way."""
    if request.param != "no repository":
        git(tree, "init", "--quiet")
    if request.param == "no git":
        monkeypatch.setenv("PATH", str(tree / "empty"))
    return list_workdir(tree)


def test_every_way_of_looking_gives_what_git_would_take_along(listed):
    assert list(listed.files) == KEPT
    assert list(listed.empty) == ["empty", "nested/empty/one", "src/venv_too"]
    assert listed.size_bytes == sum(len(TREE[name].encode()) for name in KEPT)


# --- git is the oracle -----------------------------------------------------------------------------

names = st.sampled_from(
    [
        "a",
        "b",
        "data",
        "dataset",
        "x.log",
        "x.tmp",
        "!odd",
        "#odd",
        "sp ace",
        "end ",
        "[q]",
        "Ä",
        "à",
        "tab\t",
    ]
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
# Not `a**`: what that means beneath a folder is by chance in git 2.39 (wildmatch.c compares the wrong pointers).
GLOBS = r"""
a *.log data dataset/* **/data a/** a/**/b x.* ? * ** a/*/b d*t data/* data/** /** a/b/** **a/b a//b Ä à
[ab] [!a] [^a] [b-a] [a-c] []a] [a/] [q] [\]q] \[q\] [[:alpha:]] x[[:punct:]]tmp [a \!odd \#odd a\
"""
globs = st.sampled_from([*GLOBS.split(), "sp ace", "end\\ ", "end ", "tab\t"])
rules = st.tuples(
    st.sampled_from(["", "", "!"]), st.sampled_from(["", "", "/"]), globs, st.sampled_from(["", "", "/"])
)
ignores = st.lists(rules.map("".join) | st.sampled_from(["", "# said", "  ", "!", "/"]), max_size=5)


def written(folder: Path, files: set[str], said: dict[str, list[str]]) -> Path:
    """Those files, as far as none of them is also a folder, and what is ignored by folder."""
    for name in sorted(files, key=lambda one: (one.count("/"), one)):
        path = folder / name
        if not any(parent.is_file() for parent in path.parents) and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    for where, lines in said.items():
        if (folder / where).is_dir():
            (folder / where / ".gitignore").write_text("".join(f"{line}\n" for line in lines))
    return folder


@settings(max_examples=50, deadline=None)
@given(
    files=st.sets(paths, min_size=1, max_size=12),
    top=ignores,
    inner=st.dictionaries(st.sampled_from(["a", "data", "a/b", "b/a"]), ignores, max_size=2),
    tracked=st.booleans(),
)
@example(
    files={"dataset/a", "foo/bar/dataset/a"}, top=["dataset/*"], inner={}, tracked=False
)  # skypilot#5492
@example(files={"data/a", "data/b"}, top=["data/**", "!data/a"], inner={}, tracked=False)
@example(files={"a"}, top=["!", "\\", "[", "a"], inner={}, tracked=False)
@example(files={"a/b", "b/a/b"}, top=["/a/"], inner={}, tracked=True)
def test_whatever_the_rules_are_it_is_what_git_lists_with_git_and_without_it(files, top, inner, tracked):
    with tempfile.TemporaryDirectory() as base:
        folder = written(Path(base, "job"), files, {"": top, **inner})
        plain = list_workdir(folder)
        git(folder, "init", "--quiet")
        untracked = oracle(folder)
        assert plain.rule == ".gitignore files"
        assert set(plain.files) == untracked
        if tracked:
            git(folder, "add", "--force", "--all")
        assert set(list_workdir(folder).files) == oracle(folder)


def oracle(folder: Path, *where: str) -> set[str]:
    """What git itself would take along."""
    return set(git(folder, *where, "ls-files", "-coz", "--exclude-standard").rstrip("\0").split("\0")) - {""}


@pytest.mark.parametrize("negated", ["", "*\n!*/\n!"], ids=["ignored", "taken back"])
def test_each_kind_of_rule_alone_means_what_it_does_to_git(tmp_path, negated):
    files = {
        "a/b/x.log",
        "a/b/c",
        "a/x.tmp",
        "a/data/b",
        "b/a/b",
        "b/data/a",
        "data/a",
        "dataset/a",
        "d",
        "x.log",
    }
    more = {
        "b/dataset/data/q",
        "[q]",
        "à",
        "Ä/a",
        "ab/b",
        "!odd",
        "#odd",
        "sp ace/end ",
        "q]/tab\t",
        "dt/a/c/b",
    }
    folder = written(tmp_path / "job", files | more, {})
    git(folder, "init", "--quiet", "--bare", str(tmp_path / "git"))
    where = (f"--git-dir={tmp_path / 'git'}", f"--work-tree={folder}")
    for glob in [*GLOBS.split(), "sp ace", "end\\ ", "end ", "tab\t"]:
        for line in (glob, f"/{glob}", f"{glob}/"):
            (folder / ".gitignore").write_text(f"{negated}{line}\n")
            assert set(list_workdir(folder).files) == oracle(folder, *where), line


def test_what_is_tracked_is_shipped_although_it_is_ignored_unless_it_was_deleted(tree):
    git(tree, "init", "--quiet")
    git(tree, "add", "--force", "a.log", "train.py", "data/big.bin")
    git(tree, "commit", "--quiet", "--message", "x")
    (tree / "train.py").unlink()

    found = list_workdir(tree)

    assert found.rule == "git"
    assert {"a.log", "data/big.bin"} < set(found.files)
    assert "train.py" not in found.files


def test_a_folder_inside_a_repository_is_listed_from_there_with_the_rules_above_it(tree):
    git(tree, "init", "--quiet")

    assert list_workdir(tree / "src").files == (".gitignore", "a.log", "data/small.bin")


def test_a_folder_that_the_repository_around_it_ignores_is_taken_for_itself(tree):
    git(tree, "init", "--quiet")

    found = list_workdir(tree / "data")

    assert found.files == ("big.bin",)
    assert found.rule == ".gitignore files"


def test_submodules_and_repositories_within_come_along_by_their_own_rules(tree):
    inner = write(tree / "vendor/lib", {"code.py": "1", "code.o": "2", ".gitignore": "*.o\n"})
    git(inner, "init", "--quiet")
    git(inner, "add", "code.py")
    git(inner, "commit", "--quiet", "--message", "x")
    git(tree, "init", "--quiet")

    assert {"vendor/lib/code.py", "vendor/lib/.gitignore"} < set(list_workdir(tree).files)
    assert not [name for name in list_workdir(tree).files if name.endswith(".o") or "/.git/" in name]
    git(tree, "add", "vendor/lib")  # as a link to a commit, as submodules are
    assert "vendor/lib/code.py" in list_workdir(tree).files


def test_the_folder_of_runs_is_no_part_of_what_is_shipped(tree):
    write(tree / "state/runs", {"x/run.json": "{}"})

    assert "state/runs/x/run.json" in list_workdir(tree).files
    assert "state/runs/x/run.json" not in list_workdir(tree, without=tree / "state").files


def test_links_out_of_the_folder_are_named(tree):
    (tree / "inner").symlink_to("train.py")
    (tree / "folder").symlink_to("src")
    (tree / "outer").symlink_to("/etc/hostname")

    found = list_workdir(tree)

    assert found.outward == ("outer",)
    assert {"inner", "folder", "outer"} < set(found.files), "links are shipped as links, never followed"


def test_more_than_a_gibibyte_is_more_than_code(tree):
    assert not list_workdir(tree).large
    with (tree / "weights.bin").open("wb") as file:
        file.truncate(workdir.LARGE_BYTES + 1)  # sparse

    found = list_workdir(tree)
    assert found.large
    assert found.largest[0] == ("weights.bin", workdir.LARGE_BYTES + 1)
    assert len(found.largest) == workdir.LARGEST


def test_a_virtual_environment_that_nobody_ignores_is_named(tree):
    (tree / "tools/env/lib").mkdir(parents=True)
    (tree / "tools/env/pyvenv.cfg").touch()
    assert list_workdir(tree).environments == ("tools/env",)

    # As `python -m venv` (from 3.13 on) and uv make them.
    (tree / "tools/env/.gitignore").write_text("*\n")
    assert list_workdir(tree).environments == ()


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        list_workdir(tmp_path / "nowhere")


def test_the_copy_is_the_tree_itself_links_empty_folders_and_modes_included(tree, tmp_path):
    (tree / "tool.sh").write_text("#!/bin/sh\n")
    (tree / "tool.sh").chmod(0o750)
    (tree / "key").write_text("k")
    (tree / "key").chmod(0o400)
    (tree / "link").symlink_to("src/../train.py")
    (tree / "dangling").symlink_to("nowhere")
    os.mkfifo(tree / "pipe")
    found = list_workdir(tree)

    stage_workdir(found, target := tmp_path / "copy")

    names = {
        str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    assert names == {*found.files, ".skyignore"}
    assert "pipe" not in names
    assert (target / ".skyignore").read_bytes() == b"", "SkyPilot would leave out *.py otherwise"
    assert (target / "tool.sh").stat().st_mode & 0o777 == 0o750
    assert (target / "key").stat().st_mode & 0o077 == 0
    assert (target / "link").readlink() == Path("src/../train.py")
    assert (target / "dangling").readlink() == Path("nowhere")
    assert not any((target / "nested/empty/one").iterdir())
    assert (target / "train.py").stat().st_mtime_ns == (tree / "train.py").stat().st_mtime_ns


def test_later_changes_do_not_reach_the_copy_and_what_vanished_meanwhile_is_no_failure(tree, tmp_path):
    found = list_workdir(tree)
    (tree / "keep.log").unlink()

    stage_workdir(found, target := tmp_path / "copy")
    (tree / "train.py").write_text("changed")

    assert (target / "train.py").read_text() == "print()\n"
    assert not (target / "keep.log").exists()


def test_a_copy_that_cannot_be_written_is_told_with_the_file(tree, tmp_path):
    found = list_workdir(tree)
    target = tmp_path / "copy"
    target.mkdir()

    with pytest.raises(FileExistsError):
        stage_workdir(found, target)
    (tree / "train.py").unlink()
    (tree / "train.py").mkdir()  # since it was listed
    with pytest.raises(LaunchError, match=r"train\.py could not be copied") as caught:
        stage_workdir(found, tmp_path / "other")
    assert ".gitignore" in (caught.value.hint or "")
