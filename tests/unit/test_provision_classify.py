"""What errors of providers mean, in the words in which clouds say them."""

from __future__ import annotations

import pytest

from sky_monarch.provision.classify import Failure, classify, plain, worst
from sky_monarch.provision.provider import Kind

CAPACITY = [
    "There are no longer any instances available with the requested specifications. Please refresh and try again.",
    "Out of host capacity.",
    "InsufficientInstanceCapacity: We currently do not have sufficient p5.48xlarge capacity",
    "SkuNotAvailable: The requested VM size is currently not available in location 'westus'",
    "AllocationFailed: Allocation failed. We do not have sufficient capacity for the requested VM size",
    "OverconstrainedAllocationRequest: Allocation failed",
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.",
    "LimitExceeded: The following service limits were exceeded: gpu-mi300x-count",
    "MaxSpotInstanceCountExceeded: Max spot instance count exceeded",
    "Insufficient amd.com/gpu capacity on the cluster. Required resources were not found in a single node.",
    'pods "x" is forbidden: exceeded quota: gpu-quota, requested: amd.com/gpu=8',
    "0/4 nodes are available: 4 Insufficient amd.com/gpu. FailedScheduling",
    "Slurm job 12 pending: QOSMaxGRESPerUser",
    "sbatch: AssocGrpGRES",
    "Failed to acquire resources in all zones in r1 for {Slurm(MI300X:8)}.",
    "TooManyRequests: slow down",
]
CREDENTIALS = [
    "RunPod: 401 Client Error: Unauthorized for url: https://api.runpod.io/graphql",
    "NotAuthenticated: The required information to complete authentication was not provided or was incorrect.",
    "AuthFailure: AWS was not able to validate the provided access credentials",
    "ExpiredToken: The security token included in the request is expired",
    "An error occurred (UnauthorizedOperation) when calling the RunInstances operation: You are not authorized",
    "google.auth.exceptions.RefreshError: ('invalid_grant: Bad Request'",
    "HTTP 403: access denied",
    "Permission denied (publickey).",
    "RunPod is not enabled. Run `sky check runpod` to see why.",
    "Invalid API key",
]
REFUSED = [
    (
        "No launchable resource found for task demo-h0. To fix: relax or change the resource requirements. "
        "Hint: sky show-gpus -a to list available accelerators; sky check to check the enabled clouds."
    ),
    "Catalog does not contain any instances satisfying the request: 1x RunPod({'MI999': 8})",
    "sbatch: error: invalid partition specified: gpux",
    "sbatch: error: Batch job submission failed: Requested node configuration is not available",
    "sbatch: error: Invalid generic resource (gres) specification",
]
ERROR = [
    "the connection was reset",
    "",
    "Traceback (most recent call last): KeyError: 'x'",
    "403 GiB were copied",
]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, Kind.CAPACITY) for text in CAPACITY),
        *((text, Kind.CREDENTIALS) for text in CREDENTIALS),
        *((text, Kind.REFUSED) for text in REFUSED),
        *((text, Kind.ERROR) for text in ERROR),
    ],
)
def test_the_words_of_a_cloud_are_understood(text, kind):
    assert classify(Failure(classes=("RuntimeError", "Exception"), message=text)) is kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("InvalidCloudCredentials", Kind.CREDENTIALS),
        ("NoCloudAccessError", Kind.CREDENTIALS),
        ("ApiServerAuthenticationError", Kind.CREDENTIALS),
        ("NotSupportedError", Kind.REFUSED),
        ("ResourcesMismatchError", Kind.REFUSED),
        ("UserRequestRejectedByPolicy", Kind.REFUSED),
        ("ApiServerConnectionError", Kind.ERROR),
        ("CommandError", Kind.ERROR),
        ("ResourcesUnavailableError", Kind.CAPACITY),
        ("SomethingNew", Kind.ERROR),
    ],
)
def test_a_class_that_means_one_thing_decides(name, kind):
    assert classify(Failure(classes=(name, "Exception"), message="something")) is kind


def test_a_failed_command_says_nothing_by_what_it_printed():
    quoted = "Command rsync failed with return code 1: quota exceeded, unauthorized"
    assert classify(Failure(classes=("CommandError",), message=quoted)) is Kind.ERROR


def failed(*messages):
    causes = tuple(Failure(classes=("Exception",), message=message) for message in messages)
    return Failure(classes=("ResourcesUnavailableError", "Exception"), message="Failed", causes=causes)


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        (["Out of host capacity", "Unauthorized"], Kind.CAPACITY),
        (["Unauthorized", "Invalid API key"], Kind.CREDENTIALS),
        (["Unauthorized", "connection reset"], Kind.ERROR),
        (["Unauthorized", "not supported"], Kind.CREDENTIALS),
        (["not supported"], Kind.REFUSED),
    ],
)
def test_of_several_places_one_without_capacity_is_worth_another_attempt(messages, kind):
    assert classify(failed(*messages)) is kind


def test_what_several_choices_come_to():
    assert worst([Kind.REFUSED, Kind.CAPACITY, Kind.ERROR]) is Kind.CAPACITY
    assert worst([Kind.REFUSED, Kind.ERROR]) is Kind.ERROR
    assert worst([Kind.REFUSED]) is Kind.REFUSED
    assert worst([Kind.CAPACITY, Kind.CREDENTIALS]) is Kind.CREDENTIALS
    assert worst([]) is Kind.ERROR


def test_a_reason_is_one_line_without_colours_or_control_characters_and_of_a_bounded_length():
    coloured = (
        "\x1b[33m✗\x1b[0m Failed \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\:\n\tno\r capacity\x07 \x1b[?25h"
    )

    assert plain(coloured) == "✗ Failed link: no capacity"
    assert len(plain("x" * 10_000)) == 400
    assert plain("") == ""
