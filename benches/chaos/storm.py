"""One peer in one schedule of failures."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benches.chaos import figures
from benches.chaos.figures import Strike, Yield
from benches.chaos.schedule import Failure
from benches.chaos.subjects import Subject
from benches.recovery import analysis
from benches.recovery.events import exit_file
from benches.recovery.peers import Setting
from benches.recovery.watch import REJOIN_LIMIT_S, Watch, say

#: A process that nobody has replaced by then goes on.
HANG_S = 20.0
_FIND_LIMIT_S = 5.0
_OBSERVE_EVERY_S = 5.0
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that was measured of one peer.

    Attributes:
        failures: That were carried out, by kind.
        missed: Failures that found nobody to hit.
        recovered: All groups were in step again in time after the end.
        kept: What was committed meanwhile, and stayed.
        own_pace: Samples a second at its own undisturbed step.
        lost_steps: Of each group, attempts that failed or did again what was done.
        rejoins_s: Of each group that was hit and came back.
        strikes: How many groups were hit.
        hangs_replaced: Of how many hung processes the peer itself made an end.
        false_drops: Live groups that its lighthouse dropped.
        collateral_crashes: Restarts of what nobody had hit.
        equality: Of all ranks' bits.
        losses: Held-out loss by step.
        notes: Of the peer.
    """

    failures: Mapping[str, int]
    missed: int
    recovered: bool
    kept: Yield
    own_pace: float
    lost_steps: Sequence[int]
    rejoins_s: Sequence[float]
    strikes: int
    hangs_replaced: int
    false_drops: int
    collateral_crashes: int
    equality: analysis.Equality
    losses: Mapping[int, float]
    notes: Mapping[str, float]

    @property
    def to_own_pace(self) -> float:
        """What was kept, as a share of what all groups at their undisturbed step would have."""
        return self.kept.samples_per_s / self.own_pace


@dataclass(slots=True)
class _Stopped:
    """A process that was stopped."""

    group: int
    pid: int
    handle: int
    at_s: float


class Storm(Watch):
    """A peer, and all that happens to it.

    Args:
        subject: Not started yet.
        setting: Its own.
        failures: In order.
        seconds: Length of the measured stretch.
    """

    def __init__(
        self, subject: Subject, setting: Setting, failures: Sequence[Failure], seconds: float
    ) -> None:
        super().__init__(subject, setting)
        self._subject, self._failures, self._seconds = subject, failures, seconds
        self._stopped: list[_Stopped] = []
        self._strikes: list[Strike] = []
        self._survived: Counter[int] = Counter()
        self._done: Counter[str] = Counter()
        self._missed = self._replaced = 0
        self._observed_s = 0.0

    def run(self) -> Outcome:
        """Start, hurt, let it come to rest, count.

        Raises:
            RuntimeError: It did not start, or gave up.
        """
        self._start()
        self._warm_up()
        self._idle(_SETTLE_S)
        try:
            start_s, end_s = self._rage()
        finally:
            self._resume(after_s=0.0)
        recovered = self._come_to_rest(end_s)
        self._subject.observe()
        logs = self._logs
        self._strikes += figures.failed_scripts(logs)
        return Outcome(
            failures=self._done,
            missed=self._missed,
            recovered=recovered,
            kept=figures.harvest(logs, start_s, end_s),
            own_pace=figures.own_pace(logs),
            lost_steps=figures.lost_steps(logs, start_s, end_s),
            rejoins_s=figures.rejoins_s(self._strikes, logs),
            strikes=len(self._strikes),
            hangs_replaced=self._replaced,
            false_drops=self._subject.dropped(self._survived),
            collateral_crashes=figures.collateral(self._subject.restarts(), self._strikes),
            equality=analysis.equality(figures.lasting(logs)),
            losses=figures.held_out(logs, start_s, end_s),
            notes=dict(self._subject.notes()),
        )

    def _rage(self) -> tuple[float, float]:
        """Carry out the schedule; returns when it began and ended."""
        start_s = time.monotonic()
        for number, failure in enumerate(self._failures, 1):
            self._idle(start_s + failure.at_s - time.monotonic())
            hit = self._carry_out(failure)
            self._done[failure.kind] += hit
            self._missed += not hit
            whom = f" of group {', '.join(map(str, failure.victims))}" if failure.victims else ""
            late_s = time.monotonic() - start_s - failure.at_s
            outcome = f"done, {late_s:.1f} s late" if hit else "there was nobody to hit"
            step = analysis.current_step(self._logs)
            say(f"  {number}/{len(self._failures)} {failure.kind}{whom}: {outcome}; at step {step}")
        self._idle(start_s + self._seconds - time.monotonic())
        return start_s, time.monotonic()

    def _come_to_rest(self, end_s: float) -> bool:
        """Wait until all are in step, and let them log digests; False where they are not in time."""
        for group in range(self._setting.groups):
            exit_file(self._setting.folder, group).unlink(missing_ok=True)
        try:
            self._wait_in_step(after_s=end_s, not_pids=(), within_s=REJOIN_LIMIT_S)
            self._wait_digests()
        except RuntimeError as error:
            say(f"  did not come to rest: {error}")
            return False
        return True

    def _poll(self) -> None:
        super()._poll()
        self._resume(after_s=HANG_S)
        if time.monotonic() - self._observed_s > _OBSERVE_EVERY_S:
            self._subject.observe()
            self._observed_s = time.monotonic()

    # The failures.

    def _carry_out(self, failure: Failure) -> bool:
        carry_out: dict[str, Callable[[], bool]] = {
            "kill": lambda: self._kill(failure.victims),
            "two": lambda: self._kill(failure.victims),
            "exit": lambda: self._fail(failure.victims[0]),
            "hang": lambda: self._hang(failure.victims[0]),
            "lighthouse": self._kill_lighthouse,
            "controller": self._subject.kill_controller,
        }
        return carry_out[failure.kind]()

    def _kill(self, groups: Sequence[int]) -> bool:
        """SIGKILL, one right after the other."""
        found = [(group, pid) for group in groups if (pid := self._find(group)) is not None]
        hit = False
        for group, pid in found:
            with contextlib.suppress(ProcessLookupError):
                at_s = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                self._strikes.append(Strike(at_s=at_s, group=group, pid=pid))
                hit = True
        return hit

    def _fail(self, group: int) -> bool:
        """Let the script fail by itself, between two steps."""
        if self._find(group) is None:
            return False
        exit_file(self._setting.folder, group).touch()
        return True  # where it starts, or is stopped, whoever gets that far fails then

    def _hang(self, group: int) -> bool:
        """SIGSTOP."""
        pid = self._find(group)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            at_s = time.monotonic()
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
            self._stopped.append(_Stopped(group, pid, handle, at_s))
            return True
        return False

    def _resume(self, *, after_s: float) -> None:
        """SIGCONT to those that hang for so long, where nobody has made an end of them."""
        for stopped in list(self._stopped):
            poll = select.poll()
            poll.register(stopped.handle, select.POLLIN)
            ended = bool(poll.poll(0))
            if not ended and time.monotonic() - stopped.at_s < after_s:
                continue
            if not ended:
                signal.pidfd_send_signal(stopped.handle, signal.SIGCONT)
                self._survived[stopped.group] += 1
            elif stopped.pid not in {strike.pid for strike in self._strikes}:
                self._replaced += 1
            self._strikes.append(
                Strike(at_s=stopped.at_s, group=stopped.group, pid=stopped.pid, deadly=ended)
            )
            os.close(stopped.handle)
            self._stopped.remove(stopped)

    def _kill_lighthouse(self) -> bool:
        self._subject.observe()  # it forgets when it is restarted
        self._subject.kill_lighthouse()
        return True

    def _find(self, group: int) -> int | None:
        return self._within(_FIND_LIMIT_S, lambda: self._subject.pid(group))

    def _within(self, limit_s: float, probe: Callable[[], int | None]) -> int | None:
        """What ``probe`` finds, polling; None where it finds nothing in time."""

        def look() -> int | None:
            self._poll()
            return probe()

        try:
            return self._wait(look, limit_s, "a process")
        except RuntimeError:
            return None
