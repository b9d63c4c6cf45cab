"""What an error of a provider means for the next attempt. Pure: it sees names of classes and texts.

SkyPilot passes on what dozens of clouds say, each in words of its own; which class of exception carries them says
less. So an error that is certain by its class is decided by that; any other by its words; and where a launch
failed over several places, by all of their errors together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sky_monarch.provision.provider import Kind

__all__ = ["Failure", "classify", "plain", "worst"]

_LONGEST = 400
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")

#: Classes of `sky.exceptions` (0.14.1) and Python's that mean one thing, whatever their text says.
_BY_CLASS = {
    Kind.CREDENTIALS: {
        "ApiServerAuthenticationError",
        "CloudUserIdentityError",
        "ClusterOwnerIdentityMismatchError",
        "InvalidCloudCredentials",
        "NoCloudAccessError",
        "PermissionDeniedError",
    },
    Kind.REFUSED: {
        "APINotSupportedError",
        "APIVersionMismatchError",
        "InvalidCloudConfigs",
        "InvalidClusterNameError",
        "InvalidSkyPilotConfigError",
        "KubernetesValidationError",
        "NotSupportedError",
        "ProvisionUnsupportedError",
        "ResourcesMismatchError",
        "SkyPilotMissing",
        "StorageSpecError",
        "UserRequestRejectedByPolicy",
        "WorkspaceAmbiguousError",
    },
    # Before their texts, which quote commands and whatever those printed.
    Kind.ERROR: {
        "ApiServerConnectionError",
        "ClusterSetUpError",
        "CommandError",
        "ExecutionRetryableError",
        "KubeAPIUnreachableError",
        "NetworkError",
        "RequestCancelled",
        "RequestInterruptedError",
        "ServerTemporarilyUnavailableError",
        "Timeout",
    },
}

# The order counts: a quota error of AWS is a `ClientError … UnauthorizedOperation` nowhere, but a Kubernetes quota is
# `Forbidden … exceeded quota`. What says that there is not enough is no matter of credentials.
_BY_WORDS = (
    (
        Kind.CAPACITY,
        re.compile(
            r"""insufficient .*(capacity|resources|gpu|cpu|memory|amd\.com) | insufficientinstancecapacity
            | out \s of \s (host \s)? capacity | no \s capacity | not \s enough \s (capacity|resources|nodes|gpus)
            | no \s longer \s any \s instances | no \s (longer \s)? (available|resources \s available)
            | (not|un) \s? (currently \s)? available \s in \s (this \s)? (region|zone|location|data)
            | stock \s? out | out \s of \s stock | resource_pool_exhausted | zone_resource_pool
            | skunotavailable | (overconstrained)? (zonal)? allocation (request|failed) | capacity \s (error|constraint)
            | quota | limit \s? exceeded | exceeds? \s .* limit | maxspotinstancecount | toomanyrequests
            | vcpulimitexceeded | rate \s? limit | throttl
            | qos(max|grp)\w* | assoc(max|grp)\w* | (req)?nodenotavail | reserved \s for
            | unschedulable | failedscheduling | did \s not \s .* schedul | pending \s .* timed \s? out
            | failed \s to \s acquire \s resources | resources \s are \s (busy|in \s use)""",
            re.IGNORECASE | re.VERBOSE,
        ),
    ),
    (
        Kind.CREDENTIALS,
        re.compile(
            r"""credential | \bunauthori[sz]ed\b | unauthori[sz]edoperation | forbidden
            | (http|status|error|code) \W* (code \W*)? 40[13] \b
            | notauthenticated | not \s authenticated | authentication \s (failed|required) | authfailure
            | access \s? denied | invalid \s (api \s)? (key|token) | (expired|invalid)(client)?token(id)?
            | invalid_grant | token \s has \s expired | permission \s denied | not \s authori[sz]ed
            | api \s key \s (is \s)? (missing|invalid) | is \s not \s enabled
            | no \s cloud \s (is \s enabled|access)""",
            re.IGNORECASE | re.VERBOSE,
        ),
    ),
    (
        Kind.REFUSED,
        re.compile(
            r"""no \s launchable \s resource | no \s resource \s satisfying | not \s supported | unsupported
            | catalog \s does \s not \s contain | (invalid|unknown) \s (instance|accelerator|region|zone|partition|gpu)
            | requested \s node \s configuration \s is \s not \s available | partition \w* limit
            | invalid \s (partition|account|qos|generic \s resource|gres) | does \s not \s exist \s in \s .*catalog""",
            re.IGNORECASE | re.VERBOSE,
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error, as values.

    Attributes:
        classes: Names of its class and of those that this one is derived from.
        message: What it says.
        causes: For each place that was tried, its error.
    """

    classes: tuple[str, ...]
    message: str
    causes: tuple[Failure, ...] = ()


def plain(text: str, *, longest: int = _LONGEST) -> str:
    """One line without colours: SkyPilot writes ANSI codes wherever it writes."""
    line = " ".join(_ANSI.sub("", text).split())
    line = "".join(character for character in line if character.isprintable())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def worst(kinds: Iterable[Kind]) -> Kind:
    """What several places together say: wrong credentials first, then whatever may go away by itself."""
    found = set(kinds)
    for kind in (Kind.CREDENTIALS, Kind.CAPACITY, Kind.ERROR):
        if kind in found:
            return kind
    return Kind.REFUSED if found else Kind.ERROR


def classify(failure: Failure) -> Kind:
    """What an error means.

    Several places were tried: one of them without capacity is worth another attempt, whatever the others said.
    Only where all of them refused who we are, that is it.
    """
    if failure.causes:
        kinds = {classify(cause) for cause in failure.causes}
        if Kind.CAPACITY in kinds:
            return Kind.CAPACITY
        # An error on the way there is tried again, and then says nothing of credentials either.
        return worst(kinds - {Kind.CREDENTIALS}) if Kind.ERROR in kinds else worst(kinds)
    for kind, names in _BY_CLASS.items():
        if names.intersection(failure.classes):
            return kind
    for kind, words in _BY_WORDS:
        if words.search(failure.message):
            return kind
    if "ResourcesUnavailableError" in failure.classes:
        return Kind.CAPACITY
    return Kind.ERROR
