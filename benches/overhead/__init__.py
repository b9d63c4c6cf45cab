"""What a step costs under a session and its agent, beside the same loop with TorchFT's own manager, in turns.

    python -m benches overhead [--rounds 12] [--block 100]

Two groups of one rank train the same model (0.6 M parameters, 30 ms of pretended computing a step) under
``sky-monarch up`` with a :class:`Session`, and with TorchFT's ``Manager``, ``ProcessGroupGloo`` and lighthouse; both
ask for the quorum before they compute. Both are up all the time, and train in turns: a round is four blocks of steps,
ours, theirs, theirs, ours, or the other way round. So what changes with the machine in minutes changes for both. Each
figure of a round is compared within the round; ``_low`` and ``_high`` are the 95 % interval over the rounds.

``step_ms``             from commit to commit, median of a block, then of all blocks
``rank_cpu_ms``         processor time of a rank's process a step, all its threads
``services_cpu_ms``     of all else, a step: agent, controller, lighthouse, standbys; or TorchFT's lighthouse.
                        ``services_cpu_ms_NAME``: each of them
``wall_ratio``          ours to theirs: median step (``wall_mean_ratio``: mean step)
``rank_cpu_ratio``      ours to theirs
``total_cpu_ratio``     ours to theirs, both ranks and all else
``added_cpu_ratio``     processor time that ours takes more, a rank and step, to the length of their step
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benches.overhead.paired import Block, block_of, ratio_of
from benches.recovery.gate import allow
from benches.recovery.lifetime import closing, leave_on_sigterm, workplace
from benches.recovery.peers import Setting, missing
from benches.recovery.sky import SkyMonarch
from benches.recovery.torchft import TorchFT, Tuning
from benches.recovery.watch import Watch, say
from benches.report import emit
from sky_monarch.errors import SkyMonarchError
from sky_monarch.launch.process import Process, carrying

GROUPS = 2
_OURS, _THEIRS = "sky-monarch", "torchft"
_WARM_UP_BLOCKS = 2
_BLOCK_LIMIT_S = 300.0
# Linux: the clock of another process's processor time has this number (clock_getcpuclockid(3)).
_CPUCLOCK_SCHED = 2


class Side(Watch):
    """One of the two.

    Args:
        peer: Not started yet.
        setting: Its own.
    """

    def __init__(self, peer: SkyMonarch | TorchFT, setting: Setting) -> None:
        super().__init__(peer, setting)
        self._step = _WARM_UP_BLOCKS * setting.block
        self._services: dict[int, str] = {}

    def start(self) -> None:
        """Start it, and let it train the blocks that do not count."""
        allow(self._setting.folder, self._step)
        self._start()
        self._wait_at_gate()
        self._warm_up()
        ranks = {
            event["pid"] for events in self._logs.values() for event in events if event["event"] == "step"
        }
        if isinstance(self._peer, SkyMonarch):
            others = (each for each in carrying(self._peer.folder.run_id) if each.pid not in ranks)
            self._services = {each.pid: _name_of(each) for each in others}
        elif isinstance(self._peer, TorchFT):
            self._services = {self._peer.lighthouse_pid: "lighthouse"}

    def block(self) -> Block:
        """Train one block."""
        first, before_s = self._step, self._services_cpu_s()
        self._step += self._setting.block
        allow(self._setting.folder, self._step)
        self._wait_at_gate()
        spent_s = self._services_cpu_s()
        spent_s = {name: cpu_s - before_s[name] for name, cpu_s in spent_s.items()}
        return block_of(self._logs, first, self._step, spent_s)

    def _wait_at_gate(self) -> None:
        def probe() -> bool:
            self._poll()
            return all(
                any(event["event"] == "gate" and event["step"] == self._step for event in events[-10:])
                for events in self._logs.values()
            )

        self._wait(probe, _BLOCK_LIMIT_S, f"all ranks are at step {self._step}", every_s=0.05)

    def _services_cpu_s(self) -> dict[str, float]:
        spent_s: dict[str, float] = {}
        for pid, name in self._services.items():
            cpu_s = time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
            spent_s[name] = spent_s.get(name, 0.0) + cpu_s
        return spent_s


def _name_of(process: Process) -> str:
    """Of a service of ours, by the module that it runs."""
    words = process.command().split()
    module = next((word for word in words if word.startswith("sky_monarch.")), "standby")
    return module.removeprefix("sky_monarch.").replace(".", "_").replace("worker", "standby")


def run(arguments: Sequence[str] = ()) -> int:
    """Measure; returns 1 where something is missing or did not get through.

    Args:
        arguments: Of the command line, without the bench's name.
    """
    options = _options(arguments)
    leave_on_sigterm()
    if lacks := missing("torchft-default") or missing("sky-monarch"):
        say(f"missing: {lacks}")
        return 1
    try:
        ours, theirs = measure(options.rounds, options.block, keep=options.keep)
    except (RuntimeError, ValueError, AssertionError, OSError, SkyMonarchError) as error:
        say(f"failed: {error}")
        return 1
    report(ours, theirs)
    return 0


def measure(rounds: int, block: int, *, keep: bool) -> tuple[list[Block], list[Block]]:
    """All blocks of ours and of theirs, two a round."""
    blocks: dict[str, list[Block]] = {_OURS: [], _THEIRS: []}
    with ExitStack() as stack:
        sides = {}
        for name in blocks:
            folder = stack.enter_context(workplace(keep=keep))
            setting = Setting(folder=folder, groups=GROUPS, ranks=1, kills=0, block=block)
            peer = SkyMonarch(setting) if name == _OURS else TorchFT(setting, Tuning(ask_first=True))
            stack.enter_context(closing(peer))
            sides[name] = Side(peer, setting)
            say(f"{name}: starts, logs in {folder}")
            sides[name].start()
        for number in range(rounds):
            outer, inner = (_OURS, _THEIRS) if number % 2 == 0 else (_THEIRS, _OURS)
            for name in (outer, inner, inner, outer):
                blocks[name].append(sides[name].block())
            steps_ms = {
                name: statistics.mean(b.wall_s for b in found[-2:]) * 1e3 for name, found in blocks.items()
            }
            say(
                f"  round {number + 1}/{rounds}: "
                + ", ".join(f"{n} {ms:.2f} ms" for n, ms in steps_ms.items())
            )
    return blocks[_OURS], blocks[_THEIRS]


def report(ours: Sequence[Block], theirs: Sequence[Block]) -> None:
    """Print the figures."""
    load = f"{len(ours) // 2} rounds of 4 blocks"
    for peer, blocks in ((_OURS, ours), (_THEIRS, theirs)):
        emit(peer, "step_ms", statistics.median(block.wall_s for block in blocks) * 1e3, "ms", load=load)
        emit(peer, "rank_cpu_ms", statistics.median(block.cpu_s for block in blocks) * 1e3, "ms", load=load)
        names = sorted(blocks[0].services_cpu_s)
        each_ms = {n: statistics.median(block.services_cpu_s[n] for block in blocks) * 1e3 for n in names}
        emit(peer, "services_cpu_ms", sum(each_ms.values()), "ms", load=load)
        for name, cpu_ms in each_ms.items():
            emit(peer, f"services_cpu_ms_{name}", cpu_ms, "ms", load=load)
    figures: dict[str, Callable[[Block], float]] = {
        "wall_ratio": lambda block: block.wall_s,
        "wall_mean_ratio": lambda block: block.wall_mean_s,
        "rank_cpu_ratio": lambda block: block.cpu_s,
        "total_cpu_ratio": lambda block: block.total_cpu_s(GROUPS),
    }
    for figure, of in figures.items():
        found = ratio_of(_rounds(ours, of), _rounds(theirs, of))
        emit(_OURS, figure, found.value, "ratio", load=load)
        emit(_OURS, f"{figure}_low", found.low, "ratio", load=load)
        emit(_OURS, f"{figure}_high", found.high, "ratio", load=load)
    added_s = statistics.median(block.cpu_s for block in ours) - statistics.median(
        block.cpu_s for block in theirs
    )
    step_s = statistics.median(block.wall_s for block in theirs)
    emit(_OURS, "added_cpu_ratio", added_s / step_s, "ratio", load=load)


def _rounds(blocks: Sequence[Block], of: Callable[[Block], float]) -> list[float]:
    return [(of(first) + of(second)) / 2 for first, second in zip(blocks[::2], blocks[1::2], strict=True)]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches overhead", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=12, help="of four blocks (default: %(default)s)")
    parser.add_argument("--block", type=int, default=100, help="steps of one block (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep all logs")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.block < 10:
        parser.error("--block must be at least 10")
    return options
