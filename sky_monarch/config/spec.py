"""The job: everything that a user says about one run.

A :class:`JobSpec` is valid by construction. It comes from a job file (:func:`sky_monarch.config.load_job`),
from Python, or from the two files that a run folder keeps (:meth:`JobSpec.from_public`). Values of ``envs``
and ``secrets`` leave it through :meth:`JobSpec.private_values` only: a dump, a repr and an error hold their
names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from sky_monarch.config import checks, environment
from sky_monarch.config.budget import Budget
from sky_monarch.config.checkpoint_target import require_no_credentials
from sky_monarch.config.fields import (
    ArchiveSize,
    Count,
    Head,
    Infra,
    JobName,
    Limit,
    ModuleNames,
    Part,
    Placement,
    Positive,
    Progress,
    RequiredScript,
    Restarts,
    Script,
    Seconds,
    Segments,
    Spares,
    Standby,
    Steps,
    Text,
    shown,
)
from sky_monarch.config.problem import FieldRefusalError, JobFileError
from sky_monarch.config.refusals import problems_of
from sky_monarch.config.resources import Resources
from sky_monarch.config.sync import EVERY_STEP, read_sync
from sky_monarch.errors import ConfigError

__all__ = ["Budget", "Checkpoint", "JobSpec", "Lighthouse", "Logs", "Recovery"]


def _variables(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise FieldRefusalError(f"must be a mapping of names to texts, not {shown(value)}")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise FieldRefusalError(f"{shown(name)}: names and values must be text")
        try:
            environment.check_name(name)
            environment.check_value(name, text)
        except FieldRefusalError as error:
            raise FieldRefusalError(
                f"{shown(name)} {error}", suggestion=error.suggestion, fix=error.fix
            ) from None
    return dict(value)


Variables = Annotated[
    dict[str, str],
    PlainValidator(_variables),
    PlainSerializer(lambda variables: sorted(variables), return_type=list[str]),
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}}
    ),
]


Sync = Annotated[
    str,
    BeforeValidator(read_sync),
    WithJsonSchema(
        {"anyOf": [{"const": EVERY_STEP}, {"type": "string", "pattern": r"^diloco\([1-9][0-9]*\)$"}]}
    ),
]


def _until(value: object) -> object:
    if value in ("imports", "session"):
        return value
    near = {
        "import": "imports",
        "preload": "imports",
        "warm": "imports",
        "hot": "session",
        "sessions": "session",
    }
    meant = near.get(value.lower()) if isinstance(value, str) else None
    raise FieldRefusalError(f"must be imports or session, not {shown(value)}", suggestion=meant)


def _kind_alone(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


def _kind(value: object) -> object:
    kinds = ("sky-monarch", "torchft")
    if value in kinds:
        return value
    near = {
        "sky_monarch": "sky-monarch",
        "skymonarch": "sky-monarch",
        "monarch": "sky-monarch",
        "torch-ft": "torchft",
    }
    meant = near.get(value.lower()) if isinstance(value, str) else None
    raise FieldRefusalError(f"must be {' or '.join(kinds)}, not {shown(value)}", suggestion=meant)


def _doctor(value: object) -> object:
    # YAML 1.1 tools write `off` as a truth value; 1.2 does not.
    if value in ("smoke", "off") and not isinstance(value, bool):
        return value
    near = {"on": "smoke", "true": "smoke", "yes": "smoke", "false": "off", "no": "off", "none": "off"}
    meant = near.get(str(value).lower())
    raise FieldRefusalError(f"must be smoke or off, not {shown(value)}", suggestion=meant)


class Recovery(Part):
    """What happens when a process dies or stops making progress."""

    max_restarts: Restarts = 8
    """Restarts of one replica group allowed inside `window_s`; after that it is given up."""

    window_s: Positive = 600.0
    """Restarts older than this are forgotten."""

    backoff_s: Seconds = 1.0
    """Delay of a second restart; it doubles while restarts bring no progress. The first restart waits for
    nothing."""

    backoff_max_s: Seconds = 60.0
    """Longest delay."""

    startup_limit_s: Limit = 1800.0
    """Longest time from a generation's start to its first commit, or `off`."""

    progress_limit_s: Progress = "auto"
    """Longest time between two commits, or `off`. `auto`: ten times the median step, but at least 60 s."""

    grace_s: Seconds = 10.0
    """Time between TERM and KILL when a generation is replaced or stopped."""

    standby: Standby = 1
    """Warm standby processes a rank: 0 or 1. A standby has imported `preload` and takes over at once."""

    standby_until: Annotated[Literal["imports", "session"], BeforeValidator(_until)] = "imports"
    """How far a standby goes ahead. `session`: it runs the script itself and waits where that enters its `Session`:
    back sooner, but what stands above runs twice at once, and the model is in memory (or on the device) twice."""

    standby_start: Literal["fork", "exec"] = "fork"
    """Where its imports come from. `fork`: `preload` is imported once a host, and standbys are forked from there.
    `exec`: each imports for itself, which costs the others seconds of processor time after a recovery."""
    spare: Spares = 0
    """Hosts kept ready, beyond this machine, with nothing to run: the groups of a lost host go on there at once, and
    the next spare is provisioned behind them. Each costs as much as any other host."""
    idle_limit_s: Limit = 21600.0
    """Longest time that hosts are kept while fewer than `min_replicas` groups have one, or `off`: then the run ends.
    Where no host is there, which costs nothing, capacity is waited for without an end."""
    healing: Literal["striped", "http"] = "striped"
    """How a session's group that comes back gets its state. `striped`: straight into its parameters, in pieces from all
    groups at once, each piece checked. `http`: a copy from one group, as TorchFT does."""

    on_notice: Literal["leave", "checkpoint"] = "leave"
    """What groups do whose host is about to be taken away. `leave`: finish the step and go; where the job has a
    `checkpoint` and no other group stays that has the state, one of them saves first. `checkpoint`: the one of them
    whose turn it is to save does so in any case. Both if the grace time allows."""


def _target(value: object) -> object:
    if isinstance(value, str):
        require_no_credentials(value)
    return value


class Checkpoint(Part):
    """Where the state is saved for the case that every replica group is gone."""

    to: Annotated[Text, Field(min_length=1), BeforeValidator(_target)]
    """Folder, relative to the job file's folder, or a URL that fsspec knows, such as `s3://bucket/folder`."""

    every_steps: Steps
    """Steps between two saves."""

    keep: Count = 2
    """Complete checkpoints that are kept. The last complete one is never removed."""


class Lighthouse(Part):
    """Who forms the quorums, and how long everybody waits."""

    kind: Annotated[Literal["sky-monarch", "torchft"], BeforeValidator(_kind)] = "sky-monarch"
    """`sky-monarch` is told of a death; `torchft` is TorchFT's own and waits for heartbeats to stop."""

    join_timeout_s: Positive = 30.0
    """Longest wait of a forming quorum for replica groups that are alive but have not asked to join."""

    heartbeat_timeout_s: Positive = 2.0
    """A replica group that is silent for this long leaves its quorum; it may come back."""

    quorum_timeout_s: Positive = 600.0
    """Longest wait of a replica group for a quorum; longer than the watchdog takes to end a hung peer."""

    process_group_timeout_s: Positive = 30.0
    """Longest wait of one collective between replica groups."""

    def timeouts(self) -> dict[str, float]:
        """The four limits by name, in seconds."""
        return self.model_dump(exclude={"kind"})


class Logs(Part):
    """How much captured output is kept: on its host, for each rank and generation, and of other hosts at the head."""

    segment_mib: Segments = 16
    """Size at which a log file is rotated, in MiB."""
    segments: Segments = 8
    """Log files kept; the oldest go first."""
    archive_mib: ArchiveSize = 1024
    """What ranks on other hosts print is kept beside the controller, too: so many MiB a run; the oldest go first."""


class JobSpec(Part):
    """One job."""

    name: JobName
    """Name of the job: a-z, 0-9 and `-`, at most 40."""

    replicas: Count
    """Replica groups. Each one trains a full copy of the model and can die without the others."""

    min_replicas: Count = 1
    """Replica groups that must be left for the job to go on."""

    ranks_per_replica: Count = 1
    """Processes of one replica group, one a GPU as a rule."""

    infra: Infra = "local"
    """Where it runs: `local` (this machine), `slurm/cluster/partition`, `k8s/context`, `ssh/pool`, or a cloud
    such as `runpod` or `oci/region/zone`. `any_of` and `ordered` may name others."""

    placement: Placement = "same-zone"
    """How far apart hosts may be. `any`: anywhere, which needs `sync: diloco(n)`."""

    head: Head = "auto"
    """Where lighthouse and controller run: `here`, or on a small `cluster` of their own, so that this machine may go
    away. `auto`: `here` for `local` and Slurm, `cluster` elsewhere. (`api-server`: SkyPilot's, which runs no process
    of ours, is refused by `up`.)"""

    resources: Resources = Resources()
    """Hardware that each replica group asks for."""

    workdir: Text = "."
    """Folder in which `setup` and `run` start, relative to the job file's folder."""

    setup: Script = ""
    """Shell text that prepares a host, once, before any rank starts. A failure ends the job."""

    setup_timeout_s: Positive = 1800.0
    """Longest run time of `setup`."""

    run: RequiredScript
    """What each rank runs. A single command gets no shell; anything else runs in `bash -o pipefail`."""

    doctor: Annotated[Literal["smoke", "off"], BeforeValidator(_doctor)] = "smoke"
    """What is looked at on each host before its first step. `smoke`: what `sky-monarch doctor` takes seconds for, the
    devices where the job has any; a host with an error is not used, and had anew where that can be. `off`: nothing."""

    preload: ModuleNames = ()
    """Python modules that a standby imports ahead of time, such as `[torch]`."""

    sync: Sync = EVERY_STEP
    """When the groups of a `Session` average. `every_step`: gradients, in each step. `diloco(20)`: each group takes
    20 steps alone, then all average how far they came, and take one outer step."""

    envs: Annotated[Variables, Field(repr=False, default_factory=dict)]
    """Environment variables. A value reaches the ranks as typed: `010` stays `010`."""

    secrets: Annotated[Variables, Field(repr=False, default_factory=dict)]
    """The same for values that nobody may see. `--secret NAME` takes one from your environment."""

    recovery: Recovery = Recovery()
    """Restarts, their limits, and warm standbys."""

    checkpoint: Checkpoint | None = None
    """Where the state is saved, or `null`."""

    lighthouse: Annotated[Lighthouse, BeforeValidator(_kind_alone)] = Lighthouse()
    """`sky-monarch`, `torchft`, or a mapping with the fields below."""

    logs: Logs = Logs()
    """How much captured output is kept."""

    budget: Budget = Budget()
    """What a run may cost; then it ends."""

    if not TYPE_CHECKING:  # for type checkers it has the fields as its parameters

        def __init__(self, **values: Any) -> None:
            """Raises ConfigError where the job cannot be used: every reason is in it."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise JobFileError("JobSpec", problems_of(error)) from None  # pydantic's would show secrets

        __init__.__pydantic_base_init__ = True  # model_validate, for the loader, does not come by here

    @model_validator(mode="after")
    def _fields_agree(self) -> JobSpec:
        clashes = checks.disagreements(self.model_dump())
        clashes += [
            checks.Finding(
                ("secrets", name), f"{name} is in envs and in secrets", fix="keep it in one of the two"
            )
            for name in self.envs
            if name in self.secrets
        ]
        errors = [finding for finding in clashes if finding.severity == "error"]
        if errors:
            raise ValueError("; ".join(map(str, errors)))
        environment.check_total(self.envs, self.secrets)
        return self

    def digest(self) -> str:
        """Hash of the plan: equal for equal jobs, however their files are written.

        Secrets count by name only, so that a digest in a log gives no way to guess one.

        Returns:
            64 hexadecimal digits of SHA-256.
        """
        content = {**self.public_dict(), "envs": dict(self.envs)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def public_dict(self) -> dict[str, Any]:
        """The job as JSON values, for ``job.json``: of ``envs`` and ``secrets`` the sorted names only."""
        return self.model_dump(mode="json")

    def private_values(self) -> dict[str, dict[str, str]]:
        """``{"envs": {...}, "secrets": {...}}`` with values, for ``private.json`` (0600) alone."""
        return {"envs": dict(self.envs), "secrets": dict(self.secrets)}

    @classmethod
    def from_public(cls, public: Mapping[str, Any], private: Mapping[str, Any]) -> JobSpec:
        """The job of a run folder.

        Args:
            public: What :meth:`public_dict` returned.
            private: Holds at least what :meth:`private_values` returned.

        Raises:
            ConfigError: The two do not belong together, or another version wrote a job that this one refuses.
        """
        values: dict[str, Any] = dict(public)
        for section in ("envs", "secrets"):
            variables = private.get(section, {})
            if not isinstance(variables, Mapping) or sorted(variables) != sorted(values.get(section, [])):
                raise ConfigError(
                    f"{section} of job.json and private.json differ", hint="start the run again"
                )
            values[section] = variables
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            fields = ", ".join(
                ".".join(map(str, detail["loc"])) or detail["msg"] for detail in error.errors()
            )
            raise ConfigError(
                f"job.json cannot be used: {fields}", hint="another version wrote it"
            ) from error

    def places(self) -> tuple[str, ...]:
        """Every ``infra`` that the job may run on, each once, the job's own first where it is used."""
        found = (candidate.infra or self.infra for candidate in self.resources.candidates())
        return tuple(dict.fromkeys(found))

    def resolved_workdir(self, base: Path | None = None) -> Path:
        """Absolute working folder; a relative one is taken from ``base``, by default the current folder."""
        return Path(os.path.normpath((base or Path.cwd()) / Path(self.workdir).expanduser()))
