"""How a plan is shown: a table of candidates, then the tasks of one of them, then what hosts would get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sky_monarch.cli import _output
from sky_monarch.cli._events import size_text
from sky_monarch.errors import ConfigError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch.launch.cluster_plan import Choice
    from sky_monarch.launch.placement import HostSet
    from sky_monarch.launch.remote import RemotePlan
    from sky_monarch.launch.review import Review
    from sky_monarch.launch.shipping import Shipment
    from sky_monarch.launch.skypilot import Verdict
    from sky_monarch.launch.workdir import Listing

__all__ = ["launch_lines", "say_notes", "show_plan", "wheel_line", "workdir_warnings"]

_SHOWN_HOSTS = 16
_SHOWN_NAMES = 3
#: Below this many bytes nobody needs to know what is largest.
_WORTH_A_LOOK = 10 << 20


def show_plan(
    found: Review,
    *,
    json: bool,
    yaml: bool = False,
    candidate: int = 1,
    sky: bool = False,
    shipment: Shipment | None = None,
    workdir: Listing | None = None,
) -> None:
    """Print a plan.

    Args:
        found: The plan, and what `up` says to it.
        json: As one JSON object.
        yaml: The tasks only.
        candidate: Whose tasks, from 1.
        sky: Ask the installed SkyPilot as well.
        shipment: What each host would get, for the JSON object.
        workdir: What of the working folder each host would get.

    Raises:
        ConfigError: There is no candidate of that number.
    """
    plan = found.plan
    if candidate > len(plan.choices):
        listed = ", ".join(f"{number} {_short(entry)}" for number, entry in enumerate(plan.choices, start=1))
        raise ConfigError(f"there is no candidate {candidate}", hint=f"--candidate takes {listed}")
    choice = plan.choices[candidate - 1]
    if yaml and not json:
        return _output.print_line(_tasks(choice).rstrip("\n"))
    verdicts = _look_up(plan.choices) if sky else {}
    if json:
        values = {**plan.to_json(), "up": found.to_json()}
        if sky:
            values["skypilot"] = [_verdict_values(verdicts[entry]) for entry in plan.choices]
        if shipment is not None:
            values["ship"] = shipment.summary()
        elif workdir is not None:
            values["ship"] = workdir.summary()
        return _output.print_json(values, indent=None)
    groups = f"{plan.replicas} replica groups of {plan.ranks_per_replica}"
    _output.print_line(f"{plan.name}: {groups}, at least {plan.min_replicas}")
    _output.print_line(f"plan {plan.digest[:16]}, offers of {plan.offers_read}")
    _output.print_line("")
    for line in _table(plan.choices):
        _output.print_line(line)
    for number, entry in enumerate(plan.choices, start=1):
        for note in entry.notes:
            _output.print_line(f"{number}: {note}")
        if entry in verdicts:
            _output.print_line(f"{number}: {_verdict(verdicts[entry])}")
    for refusal in plan.refused:
        _output.print_line(f"refused: {refusal}")
    _show_hosts(choice, candidate)
    if workdir is not None:
        _output.print_line("")
        for line in workdir_lines(workdir):
            _output.print_line(line)
    if choice.tasks:
        _output.print_line("")
        _output.print_line(_tasks(choice).rstrip("\n"))
    return None


def say_notes(
    left_out: Iterable[str], refusals: Iterable[SkyMonarchError], *, lacking: Iterable[SkyMonarchError]
) -> None:
    """Say on stderr what `up` makes of a plan.

    Args:
        left_out: Candidates that it does not launch.
        refusals: Why it would refuse the job.
        lacking: What it would not find on this machine.
    """
    for reason in left_out:
        _output.say(f"note: `up` leaves out {reason}")
    for what, errors in (("would refuse", refusals), ("would not start from this machine", lacking)):
        for error in errors:
            hint = f"; {error.hint}" if error.hint else ""
            _output.say(f"note: `up` {what}: {error}{hint}")


def _short(choice: Choice) -> str:
    """A candidate in few words."""
    spot = " spot" if choice.use_spot else ""
    return f"({choice.accelerator or 'no GPU'}{spot} on {choice.infra})"


def _table(choices: Sequence[Choice]) -> list[str]:
    header = ("", "INFRA", "HOSTS", "EACH", "SPOT", "NETWORK", "$/H", "AS OF")
    return _output.columns(header, [_row(number, entry) for number, entry in enumerate(choices, start=1)])


def workdir_lines(listing: Listing) -> list[str]:
    """What of the working folder each host gets, for people."""
    count = len(listing.files)
    files = f"{count:,} file{'' if count == 1 else 's'}, {size_text(listing.size_bytes)}"
    lines = [f"each host gets {files} of {listing.source}, less what {listing.rule} ignores"]
    if listing.size_bytes >= _WORTH_A_LOOK:
        largest = [f"{name} {size_text(size_bytes)}" for name, size_bytes in listing.largest]
        lines.append(f"largest of it: {', '.join(largest)}")
    return [_output.plain(line) for line in lines]


def workdir_warnings(listing: Listing) -> list[str]:
    """What of it may not be meant."""
    found = []
    if listing.large:
        found.append(
            f"each host gets a copy of the working folder, {size_text(listing.size_bytes)}: so much is rarely code; "
            "data that a .gitignore file names stays here"
        )
    if listing.environments:
        found.append(
            f"virtual environments are of no use on a host: name them in a .gitignore file, and they stay here: "
            f"{_some(listing.environments)}"
        )
    if listing.outward:
        shown = _some(listing.outward)
        found.append(f"symbolic links that lead out of the working folder lead nowhere on a host: {shown}")
    return [_output.plain(text) for text in found]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")


def _ship_lines(shipment: Shipment) -> list[str]:
    """What each host gets, for people."""
    return [*workdir_lines(shipment.workdir), wheel_line(shipment)]


def wheel_line(shipment: Shipment) -> str:
    """What it gets of sky-monarch, for people."""
    return f"and {shipment.wheel.file_name}, beside its own torch"


def launch_lines(plan: RemotePlan) -> list[str]:
    """What is about to be launched: candidates and prices, what is shipped, where hosts dial the head."""
    lines = _table(plan.choices)
    for number, entry in enumerate(plan.choices, start=1):
        lines += [f"{number}: {note}" for note in entry.notes]
    lines += [f"left out: {reason}" for reason in plan.left_out]
    if plan.shipment is not None:
        lines += _ship_lines(plan.shipment)
    if plan.address is None:
        lines.append(
            f"lighthouse and controller run on {plan.choices[0].head.cluster}, which is launched first"
        )
    else:
        lines.append(f"hosts dial this machine at {plan.address}")
    return lines


def _row(number: int, choice: Choice) -> tuple[str, ...]:
    hosts = len(choice.hosts)
    each = choice.accelerator or "-"
    if choice.instance:
        each = f"{each} ({choice.instance})"
    price = "unknown" if choice.usd_per_hour is None else f"{choice.usd_per_hour:.2f}"
    if choice.infra == "local":
        price = "-"
    spot = "yes" if choice.use_spot else "no"
    network = choice.reachability
    return (str(number), choice.infra, str(hosts), each, spot, network, price, choice.price_day or "-")


def _show_hosts(choice: Choice, candidate: int) -> None:
    _output.print_line("")
    _output.print_line(f"candidate {candidate}:")
    rows = [(host.cluster, _groups(host)) for host in choice.hosts[:_SHOWN_HOSTS]]
    for line in _output.columns(("CLUSTER", "GROUPS"), rows):
        _output.print_line(f"  {line}")
    if len(choice.hosts) > _SHOWN_HOSTS:
        _output.print_line(f"  and {len(choice.hosts) - _SHOWN_HOSTS} more")
    where = f"on {choice.head.cluster}" if choice.head.cluster else choice.head.kind
    _output.print_line(f"  lighthouse and controller: {where}")


def _groups(host: HostSet) -> str:
    found = _ranges(host.groups)
    return found if host.nodes == 1 else f"{found}, part {host.node + 1} of {host.nodes}"


def _ranges(groups: Iterable[int]) -> str:
    """``0-3``; groups of a host follow each other."""
    found = list(groups)
    if not found:
        return "spare"
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _tasks(choice: Choice) -> str:
    """A YAML document a task."""
    from sky_monarch.launch.tasks import ADDED
    from sky_monarch.launch.yaml_text import yaml_text

    added = f"# `up` adds what only a run knows: {', '.join(ADDED)}\n" if choice.tasks else ""
    return added + "".join(
        f"---\n# sky launch -c {cluster}\n{yaml_text(task)}" for cluster, task in choice.documents()
    )


def _look_up(choices: Iterable[Choice]) -> dict[Choice, Verdict | None]:
    """What SkyPilot's catalogs say of each; None for this machine."""
    from sky_monarch.launch import skypilot

    found: dict[Choice, Verdict | None] = {}
    for choice in choices:
        # All hosts of a choice are alike; the last is never the head.
        task = next(reversed([task for _, task in choice.documents()]), None)
        found[choice] = None if task is None else skypilot.look_up(task)
    return found


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "this machine needs no SkyPilot"
    if not verdict.found:
        return f"SkyPilot finds nothing: {verdict.reason}"
    listed = ", ".join(f"{instance} at {usd:.2f} $/h" for instance, usd in verdict.found[:3])
    return f"SkyPilot finds {listed} a cluster"


def _verdict_values(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    found = [{"instance": instance, "usd_per_hour": usd} for instance, usd in verdict.found]
    return {"found": found, "reason": verdict.reason}
