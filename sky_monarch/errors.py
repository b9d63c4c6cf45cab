"""Every error that sky-monarch raises on purpose.

SkyMonarchError
├── ConfigError                 exit 2   the job file or an argument cannot be used
├── LaunchError                 exit 1   hosts or processes could not be started
│   ├── NoCapacityError         exit 3
│   ├── CredentialsError        exit 1
│   ├── SetupError              exit 5   the job's setup command failed
│   └── RunExistsError          exit 7   a run of that name is live
├── RunNotFoundError            exit 6
├── RunFailedError              exit 1
│   ├── RunCancelledError       exit 8
│   └── BudgetSpentError        exit 9   the job's budget was spent
├── SupervisionError            exit 4   what was supervised is lost
│   └── RestartsExhaustedError  exit 4
├── ActorError                  exit 1   an endpoint raised
│   └── DeadlockError           exit 1
├── QuorumError                 exit 1
│   └── QuorumTimeoutError      exit 1
├── CheckpointError             exit 1
├── DeviceError                 exit 1
│   └── CommunicatorError       exit 1   its ranks need another one
│       └── NotJoinedError      exit 1   it was not made; another attempt may succeed
├── SystemCallError             exit 1   the operating system said no
├── TransferError               exit 1   memory of another process could not be read or written
│   ├── OutOfBoundsError        exit 1
│   ├── AccessForbiddenError    exit 1
│   ├── StaleHandleError        exit 1
│   └── DigestError             exit 1
└── ChannelError                exit 1
    ├── ChannelClosedError      exit 1
    ├── ChannelTimeoutError     exit 1
    ├── PeerRefusedError        exit 1
    ├── FrameTooLargeError      exit 1
    └── ProtocolError           exit 1
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessForbiddenError",
    "ActorError",
    "BudgetSpentError",
    "ChannelClosedError",
    "ChannelError",
    "ChannelTimeoutError",
    "CheckpointError",
    "CommunicatorError",
    "ConfigError",
    "CredentialsError",
    "DeadlockError",
    "DeviceError",
    "DigestError",
    "FrameTooLargeError",
    "LaunchError",
    "NoCapacityError",
    "NotJoinedError",
    "OutOfBoundsError",
    "PeerRefusedError",
    "ProtocolError",
    "QuorumError",
    "QuorumTimeoutError",
    "RestartsExhaustedError",
    "RunCancelledError",
    "RunExistsError",
    "RunFailedError",
    "RunNotFoundError",
    "SetupError",
    "SkyMonarchError",
    "StaleHandleError",
    "SupervisionError",
    "SystemCallError",
    "TransferError",
]


class SkyMonarchError(Exception):
    """Root of the tree.

    Attributes:
        hint: What to do about it, one sentence; None where nothing helps.
        exit_code: What the CLI exits with when this error ends it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(SkyMonarchError):
    """The job file or an argument cannot be used, or what they need is missing here; nothing was started."""

    exit_code = 2


class LaunchError(SkyMonarchError):
    """Hosts or processes could not be started."""


class NoCapacityError(LaunchError):
    """Every candidate was tried and none had room."""

    exit_code = 3


class CredentialsError(LaunchError):
    """A provider refused who we are."""


class SetupError(LaunchError):
    """The job's ``setup`` command failed; its run command never started."""

    exit_code = 5


class RunExistsError(LaunchError):
    """A live run has this name already."""

    exit_code = 7


class RunNotFoundError(SkyMonarchError):
    """No run of this name or id is known."""

    exit_code = 6


class RunFailedError(SkyMonarchError):
    """The run ended without reaching its goal."""


class RunCancelledError(RunFailedError):
    """The run was ended by ``down``."""

    exit_code = 8


class BudgetSpentError(RunFailedError):
    """What the job may cost was spent before it was done."""

    exit_code = 9


class SupervisionError(SkyMonarchError):
    """What was supervised is lost: fewer than ``min_replicas`` groups can go on, or a process of an actor mesh died."""

    exit_code = 4


class RestartsExhaustedError(SupervisionError):
    """A replica group spent its restart budget."""


class ActorError(SkyMonarchError):
    """An endpoint raised; its own exception is the cause, with the traceback that it has there."""


class DeadlockError(ActorError):
    """An actor would wait for itself."""


class QuorumError(SkyMonarchError):
    """The lighthouse gave no quorum, or a member left in mid-collective."""


class QuorumTimeoutError(QuorumError):
    """No quorum formed before the deadline."""


class CheckpointError(SkyMonarchError):
    """A checkpoint could not be written or read."""


class DeviceError(SkyMonarchError):
    """An accelerator or its mask cannot be used."""


class CommunicatorError(DeviceError):
    """A communicator of devices is lost, with whatever it was at: its ranks need another one. The devices are not."""


class NotJoinedError(CommunicatorError):
    """A communicator was not made in time. Nothing is lost: another attempt, with another id, may succeed."""


class SystemCallError(SkyMonarchError):
    """The operating system said no."""


class TransferError(SkyMonarchError):
    """Root of what can go wrong with memory of another process, beside its death and a deadline."""


class OutOfBoundsError(TransferError):
    """A range is not inside the registered memory."""


class AccessForbiddenError(TransferError):
    """The owner of the memory does not allow that."""


class StaleHandleError(TransferError):
    """The owner has withdrawn the memory, or has it no more as of the handle's epoch."""


class DigestError(TransferError):
    """Bytes are not what their digest says."""


class ChannelError(SkyMonarchError):
    """Root of what can go wrong between agent, controller and session."""


class ChannelClosedError(ChannelError):
    """The peer, or this end, is gone."""


class ChannelTimeoutError(ChannelError):
    """A deadline passed."""


class PeerRefusedError(ChannelError):
    """The peer is unknown, speaks another version or could not prove who it is."""


class FrameTooLargeError(ChannelError):
    """A frame or a queue exceeds its bound."""


class ProtocolError(ChannelError):
    """Bytes that the protocol does not allow."""
