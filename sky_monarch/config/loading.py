"""From a job file to a :class:`JobSpec`, or to everything that is wrong with it.

One pass finds all: a check that cannot run because its own field is unusable is skipped, the others
still run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sky_monarch.config.checkpoint_target import folder_of, require_store
from sky_monarch.config.checks import disagreements
from sky_monarch.config.document import (
    DocumentError,
    Items,
    Node,
    Scalar,
    Table,
    core_value,
    is_null,
    locate,
    path_text,
    read_document,
)
from sky_monarch.config.document import (
    Path as NodePath,
)
from sky_monarch.config.fields import Part, slug
from sky_monarch.config.problem import FieldRefusalError, JobFileError, Problem, Severity, sort_problems
from sky_monarch.config.resources import ResourceOption, Resources, parse_accelerators
from sky_monarch.config.source import Source, read_source
from sky_monarch.config.spec import Budget, Checkpoint, JobSpec, Lighthouse, Logs, Recovery
from sky_monarch.config.suggestions import suggest
from sky_monarch.config.variables import Overrides, read_variables

__all__ = ["Checked", "check_job", "load_job"]

_SECTIONS: dict[str, type[Part]] = {
    "": JobSpec,
    "resources": Resources,
    "recovery": Recovery,
    "checkpoint": Checkpoint,
    "lighthouse": Lighthouse,
    "logs": Logs,
    "budget": Budget,
}
_FIELDS = {section: tuple(model.model_fields) for section, model in _SECTIONS.items()}
_OPTION_FIELDS = {**_FIELDS, "resources": tuple(ResourceOption.model_fields)}

# Fields whose text counts as typed: `name: 1.10` is "1.10", and `run: true` runs `true`.
_TEXTS = frozenset(
    {"name", "infra", "workdir", "setup", "run", "sync", "checkpoint.to", "lighthouse", "lighthouse.kind"}
)
# Also in the options of a list, whose paths are not known beforehand.
_TEXT_NAMES = ("cpus", "memory_gib", "infra", "image")
_NULLABLE = frozenset(
    {"checkpoint", "accelerators", "cpus", "memory_gib", "any_of", "ordered", "gpus_per_host", "image"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Outcome of a check.

    Attributes:
        source: Path of the file, or ``<text>``.
        job: The job; None where a problem is an error.
        problems: By line. Warnings come with a job, errors without.
    """

    source: str
    job: JobSpec | None
    problems: tuple[Problem, ...]


def load_job(
    source: str | os.PathLike[str] | bytes,
    *,
    env_overrides: Overrides | None = None,
    secret_overrides: Overrides | None = None,
    environ: Mapping[str, str] | None = None,
    base_dir: Path | None = None,
) -> JobSpec:
    """Read a job file. :func:`check_job` is the same with the warnings.

    Args:
        source: A path; or the content itself, as bytes or as a text of more than one line.
        env_overrides: Values that replace or add to ``envs``; None takes the value from ``environ``.
        secret_overrides: The same for ``secrets``.
        environ: The caller's environment, by default this process's.
        base_dir: Folder where relative paths start; default: the file's, or the current one for content.

    Raises:
        JobFileError: The job cannot be used; all reasons are in its ``problems``.
    """
    checked = check_job(
        source,
        env_overrides=env_overrides,
        secret_overrides=secret_overrides,
        environ=environ,
        base_dir=base_dir,
    )
    if checked.job is None:
        raise JobFileError(checked.source, checked.problems)
    return checked.job


def check_job(
    source: str | os.PathLike[str] | bytes,
    *,
    env_overrides: Overrides | None = None,
    secret_overrides: Overrides | None = None,
    environ: Mapping[str, str] | None = None,
    base_dir: Path | None = None,
) -> Checked:
    """Read a job file and say all that there is to say about it.

    The arguments are those of :func:`load_job`. Nothing that a file holds makes this raise.
    """
    is_path = isinstance(source, os.PathLike) or (isinstance(source, str) and not {"\n", "\r"} & set(source))
    shown = ascii(os.fspath(source))[1:-1] if is_path else "<text>"
    try:
        read = read_source(source, base_dir)
        root, problems = read_document(read.text)
    except DocumentError as error:
        return Checked(source=shown, job=None, problems=(error.problem,))
    loader = _Loader(read=read, root=root, problems=problems)
    caller = os.environ if environ is None else environ
    job = loader.load(
        {"envs": env_overrides or {}, "secrets": secret_overrides or {}}, caller, shown if is_path else None
    )
    problems = sort_problems(loader.problems)
    return Checked(source=shown, job=job, problems=tuple(problems))


@dataclass
class _Loader:
    """One job file on its way to a spec."""

    read: Source
    root: Node
    problems: list[Problem]
    refused: set[NodePath] = field(default_factory=set)  # what pydantic need not complain about again

    def load(
        self, overrides: Mapping[str, Overrides], environ: Mapping[str, str], file: str | None
    ) -> JobSpec | None:
        if not isinstance(self.root, Table):
            what = "a list" if isinstance(self.root, Items) else "one text"
            self._problem(
                (), f"the job file is {what}", fix="write one `field: value` a line, such as `name: my-job`"
            )
            return None
        values = self._plain_table(self.root, ())
        values.update(read_variables(self.root, overrides, environ, self._problem))
        self._resolve_paths(values)
        job = self._validated(values, file)
        self._disagreements(values)
        if any(problem.severity == "error" for problem in self.problems):
            return None
        return job

    def _plain_table(self, table: Table, path: NodePath) -> dict[str, Any]:
        values = {}
        for key, (_, node) in table.entries.items():
            here = (*path, key)
            if here in (("envs",), ("secrets",)):
                continue
            if is_null(node) and isinstance(node, Scalar) and not self._may_be_null(here, node):
                self.refused.add(here)
                continue
            values[key] = self._plain(node, here)
        return values

    def _plain(self, node: Node, path: NodePath) -> Any:
        if isinstance(node, Table):
            return self._plain_table(node, path)
        if isinstance(node, Items):
            return [self._plain(item, (*path, index)) for index, item in enumerate(node.nodes)]
        if is_null(node):
            return None
        textual = path_text(path) in _TEXTS or path[-1] in _TEXT_NAMES or path[0] == "preload"
        return node.text if textual else core_value(node)

    def _may_be_null(self, path: NodePath, node: Scalar) -> bool:
        """Refuse a field that was left empty, or that is null where null means nothing."""
        if _in_accelerators(path):
            return True  # `{MI300X, MI325X}`: names without a count
        name, known = str(path[-1]), self._fields(path[:-1])
        if known is None or name not in known:
            return True  # reported as an unknown field
        if node.text and name in _NULLABLE:
            return True
        none = f"write `{name}: null` (or leave the line out) for none" if name in _NULLABLE else None
        required = path in (("run",), ("name",), ("replicas",))
        fix = none or ("give it a value" if required else "give it a value, or leave the line out")
        self._problem(path, "is empty" if not node.text else "must not be null", fix=fix)
        return False

    def _fields(self, section: NodePath) -> tuple[str, ...] | None:
        if len(section) == 3 and section[0] == "resources" and section[1] in ("any_of", "ordered"):
            return _OPTION_FIELDS["resources"]
        return _FIELDS.get(path_text(section)) if len(section) < 2 else None

    def _resolve_paths(self, values: dict[str, Any]) -> None:
        """Make the two paths absolute, and look whether they can be used."""
        workdir = values.get("workdir", ".")
        if isinstance(workdir, str) and workdir and "\0" not in workdir:
            folder = self._absolute(("workdir",), workdir)
            if folder and not _is(os.path.isdir, folder):
                exists = _is(os.path.exists, folder)
                message = f"{folder} is no folder" if exists else f"{folder} does not exist"
                self._problem(("workdir",), message, fix="it is taken relative to the job file's folder")
            values["workdir"] = folder or workdir
        elif workdir == "":
            self._problem(("workdir",), "is empty", fix="write `.` for the job file's folder")
        checkpoint = values.get("checkpoint")
        target = checkpoint.get("to") if isinstance(checkpoint, dict) else None
        if isinstance(checkpoint, dict) and isinstance(target, str) and target and "\0" not in target:
            path = ("checkpoint", "to")
            try:
                local = folder_of(target)
                if local is None:
                    require_store(target)
                    return
            except FieldRefusalError as error:
                self._problem(path, str(error), fix=error.fix)
                return
            folder = self._absolute(path, local)
            if folder and _is(os.path.exists, folder) and not _is(os.path.isdir, folder):
                self._problem(path, f"{folder} is no folder")
            checkpoint["to"] = folder or target

    def _absolute(self, path: NodePath, text: str) -> str | None:
        try:
            return os.path.normpath(self.read.base / Path(text).expanduser())
        except RuntimeError:  # ~nobody-of-that-name
            self._problem(path, f"{text[:80]} names an unknown user")
            return None

    def _validated(self, values: dict[str, Any], file: str | None) -> JobSpec | None:
        try:
            return JobSpec.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
        meant = {self._unknown(detail["loc"]) for detail in details if detail["type"] == "extra_forbidden"}
        for detail in details:
            path, kind = detail["loc"], detail["type"]
            if (
                not path
                or kind == "extra_forbidden"
                or any(path[: len(known)] == known for known in self.refused)
            ):
                continue  # fields that disagree, and what has been said already
            if kind == "missing":
                if path_text(path) not in meant:
                    self._problem(path, "is missing", fix=_missing_fix(path, file))
                continue
            cause = detail.get("ctx", {}).get("error")
            if isinstance(cause, FieldRefusalError):
                self._problem(path, str(cause), suggestion=cause.suggestion, fix=cause.fix)
            elif kind in ("model_type", "model_attributes_type"):
                self._problem(path, "must be a mapping of fields", fix="write its fields indented below it")
            else:
                message = detail["msg"]
                self._problem(path, message[:1].lower() + message[1:])
        return None

    def _unknown(self, path: NodePath) -> str | None:
        """Report an unknown field; returns the whole path of the one that was probably meant."""
        section = path[:-1]
        option = len(section) == 3
        name = "resources" if option else path_text(section)
        fields = _OPTION_FIELDS if option else _FIELDS
        suggestion, known = suggest(str(path[-1]), name, fields), fields.get(name, ())
        if suggestion is None:
            self._problem(path, "unknown field", fix=f"known here: {', '.join(known)}", key=True)
            return None
        elsewhere = suggestion not in known
        home = suggestion.rpartition(".")[0] or "the top level"
        fix = f"it belongs to {home}" if elsewhere else None
        self._problem(path, "unknown field", suggestion=suggestion, fix=fix, key=True)
        return suggestion if elsewhere or not section else f"{name}.{suggestion}"

    def _disagreements(self, values: dict[str, Any]) -> None:
        """Run the checks between fields on what is usable of the file, with the defaults filled in."""
        bad = {problem.path for problem in self.problems if problem.severity == "error"}
        usable: dict[str, Any] = {}
        for name, info in JobSpec.model_fields.items():
            given = values.get(name, info.get_default(call_default_factory=True))
            model = _SECTIONS.get(name)
            if name == "lighthouse" and isinstance(given, str):
                given = {"kind": given}
            if model is not None and isinstance(given, dict):
                defaults = {key: part.default for key, part in model.model_fields.items()}
                given = {
                    key: value for key, value in {**defaults, **given}.items() if f"{name}.{key}" not in bad
                }
            elif isinstance(given, Part):
                given = given.model_dump()
            if name not in bad:
                usable[name] = given
        resources = usable.get("resources")
        if isinstance(resources, dict) and "accelerators" in resources:
            resources["accelerators"] = _canonical(resources["accelerators"])
        for finding in disagreements(usable):
            self._problem(finding.path, finding.message, fix=finding.fix, severity=finding.severity)

    def _problem(
        self,
        path: NodePath,
        message: str,
        *,
        suggestion: str | None = None,
        fix: str | None = None,
        key: bool = False,
        placed: bool = True,
        severity: Severity = "error",
    ) -> None:
        position = locate(self.root, path, key=key) if placed else None
        self.problems.append(
            Problem(
                path=path_text(path),
                message=message,
                line=position.line if position else None,
                column=position.column if position else None,
                suggestion=suggestion,
                fix=fix,
                severity=severity,
            )
        )


def _in_accelerators(path: NodePath) -> bool:
    return "accelerators" in path[:-1] and path[0] == "resources"


def _canonical(accelerators: Any) -> Any:
    try:
        choice = parse_accelerators(accelerators)
    except FieldRefusalError:
        return None  # reported with its field
    return choice.canonical() if choice else None


def _is(test: Any, folder: str) -> bool:
    try:
        return bool(test(folder))
    except (OSError, ValueError):  # too long, or not in the file system's encoding
        return False


def _missing_fix(path: NodePath, file: str | None) -> str | None:
    examples = {
        "name": f"add `name: {slug(Path(file).stem) if file else 'my-job'}`",
        "replicas": "add `replicas: 2`, the number of replica groups",
        "run": "add `run: python train.py`, the command of each rank",
        "checkpoint.to": "add `to: checkpoints`, a folder",
        "checkpoint.every_steps": "add `every_steps: 100`",
    }
    return examples.get(path_text(path))
