"""The session with ``sync: diloco(n)``: each group trains alone for ``n`` steps, then all take one outer step.

A *round* is ``n`` steps (the last one those that are left to the target step), and what TorchFT's manager, the
lighthouse and the votes count; ``session.step`` counts steps. Between two outer steps nobody asks for a quorum, and
nobody waits but for the ranks of its own group. At the end of a round the way that each group went is averaged over
the quorum; where somebody dies meanwhile, the kept ways are averaged again without it. A process that starts asks at
once and waits for the end of the others' round: there it heals to the parameters of the last outer step, which is
taken together with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sky_monarch.errors import ConfigError, QuorumError
from sky_monarch.training.diloco import InnerRates, Outer, Shares
from sky_monarch.training.healing import Replicated
from sky_monarch.training.manager import SessionManager
from sky_monarch.training.session import Session

__all__ = ["DilocoSession"]

logger = logging.getLogger(__name__)


class DilocoSession(Session):
    """What ``Session(...)`` makes where groups average every ``n`` steps; the arguments are the same.

    * :attr:`step` counts the steps that this group has taken, those of the unfinished round included. They are
      committed with the round, or done again.
    * The rates of the optimizer, the scheduler and the sampler's position go back with a round that is done again;
      the optimizer's moments and what the script registered do not.
    * Ranks of one group average in every step, weighted by their samples; groups weigh the same, as in TorchFT.

    Raises:
        ConfigError: As :class:`Session`; or ``outer_optimizer`` is not one over the parameters that are trained.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        if self._sharding.mesh is not None:
            raise ConfigError(
                "sync: diloco(n) with a model that its group shards is not supported",
                hint="sync: every_step, or one rank a group with the whole model",
            )
        self._state.round_steps, self._state.last_step = self._local_steps, self._target_step
        self._outer = Outer(model, optimizer, self._outer_optimizer)
        self._rates = InnerRates(optimizer, self._scheduler)
        self._taken = self._samples = 0
        self._joined = self._nobody = False
        outer = self._outer.optimizer
        self.register_state("diloco", outer.load_state_dict, outer.state_dict)
        self._state.replace("model", self._replace_parameters, self._outer.model_state)
        self._state.replace(
            "optimizer", self._then_keep_rates(optimizer.load_state_dict), self._rates.optimizer_state
        )
        if self._scheduler is not None:
            self._state.replace(
                "scheduler",
                self._then_keep_rates(self._scheduler.load_state_dict),
                self._rates.schedule_state,
            )

    def __enter__(self) -> DilocoSession:
        """As that of :class:`Session`."""
        self._outer.keep()
        self._rates.keep()
        super().__enter__()
        device = next(self._model.parameters()).device
        self._shares = Shares(self._env, device)
        return self

    # What a recipe asks.

    @property
    def step(self) -> int:
        """Steps taken so far: those of the rounds that are committed, and those of this group since."""
        return self._committed_steps + self._taken

    @property
    def _committed_steps(self) -> int:
        return 0 if self._manager is None else self._steps_of(int(self._manager.current_step()))

    def _steps_of(self, rounds: int) -> int:
        """Steps of so many rounds: the last one ends at the target step, however long it is."""
        steps = rounds * self._local_steps
        return steps if self._target_step is None else min(steps, self._target_step)

    @property
    def _round_steps(self) -> int:
        """Steps of the round under way; 0 once the target step is committed."""
        rounds = int(self._entered().current_step())
        return self._steps_of(rounds + 1) - self._steps_of(rounds)

    @property
    def finished(self) -> bool:
        """Whether the target step is committed."""
        return self._target_step is not None and self._committed_steps >= self._target_step

    def digest(self) -> str:
        """SHA-256 of the parameters after the last outer step: equal on all groups at any time of a round."""
        if not self._taken:
            return super().digest()
        with self._outer.in_place():
            return super().digest()

    # The loop.

    @property
    def running(self) -> bool:
        """Begin the next step; False when the target step is committed.

        The first one waits: for the end of the round of the others, or, where all begin, for all of them.

        Raises:
            SystemExit: With code 0: this process was asked to leave. The steps since the last outer one are lost.
            QuorumTimeoutError: No quorum formed in time.
            QuorumError: The lighthouse cannot be reached.
        """
        manager = self._entered()
        self._link.check()
        if self._begun:
            return True
        self._leave_if_asked()
        while not (self._joined or self.finished):
            self._drain.leave_if_requested()
            self._link.check()
            self._synchronise(manager, {})
        if self.finished:
            return False
        self._contributions.begin()
        self._begun, self._averaged = True, False
        self._optimizer.zero_grad()
        return True

    def average_gradients(self, *, samples: int | None = None) -> bool:
        """Average the gradients over the ranks of this group now, to look at them before :meth:`step_optimizer`.

        Args:
            samples: As there.

        Returns:
            True: no other group can be in the way.
        """
        self._in_step()
        self._average_within(samples)
        self._averaged = True
        return True

    def step_optimizer(
        self, metrics: Mapping[str, float | torch.Tensor] | None = None, *, samples: int | None = None
    ) -> bool:
        """Average the gradients over the ranks of this group and step the optimizer; at the end of a round, sync.

        Args:
            metrics: As that of :class:`Session`.
            samples: The weight of this rank's gradients among those of its group.

        Returns:
            False if this was the last step of a round that could not be committed: all of its steps are done
            again, from the parameters of the last outer step.

        Raises:
            QuorumTimeoutError: No quorum formed in time.
            QuorumError: The lighthouse cannot be reached, nothing was committed in a hundred attempts, or another
                rank of this group left.
        """
        manager = self._in_step()
        self._link.check()
        if not self._averaged:
            self._average_within(samples)
        if self._before_update is not None:
            self._before_update(self.step)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        if self._sampler is not None:
            self._sampler.take()
        self._taken += 1
        self._samples += self._contributions.total
        self._begun = self._averaged = False
        values = {name: float(value) for name, value in (metrics or {}).items()}
        if self._taken < self._round_steps:
            self._link.committed(self.step, manager.quorum_id, manager.num_participants(), values)
            return True
        self._outer.set_pseudogradients()
        return self._synchronise(manager, values)

    def _average_within(self, samples: int | None) -> None:
        counts = self._contributions
        weight = counts.offer(samples)
        if self._inner is None:
            counts.settle_within()
            return
        self._buckets.pack(weight)
        self._buckets.average_within(self._inner, counts if counts.offered else None)
        if counts.offered:
            counts.settle_within()
            if (correction := counts.correction) != 1:
                for bucket in self._buckets.buckets:
                    bucket *= correction
        self._buckets.unpack()

    # The end of a round.

    def _synchronise(self, manager: SessionManager, metrics: Mapping[str, float]) -> bool:
        """Average the ways of all groups until the vote passes; else go back to where the round began."""
        for _ in range(self._retries + 1):
            self._rounds.ask()
            with self._link.waiting():
                self._rounds.wait()
                self._average_ways(manager)
            if self._vote(manager):
                self._commit_round(manager, metrics)
                return True
            # Who has healed meanwhile goes on trying, with nothing to give: the others wait for it.
            self._agreement.again(manager, True)
            self._nobody = self._agreement.all(self._nobody)
            if self._nobody or self.finished:
                break
        if self._nobody:
            self._begin_together(manager)
        self._roll_back()
        return False

    def _average_ways(self, manager: SessionManager) -> None:
        """One attempt; where it fails, the vote will be no."""
        self._nobody = False
        if self.finished:
            manager.report_error(QuorumError("healed to the target step"))
            return
        first = manager.current_step() == 0 and manager.is_participating()
        if first and self._agreement.all(manager.errored() is None) and not self._begin(manager):
            return
        if manager.errored() is not None:
            # A heal that failed, for one: this member reduces nothing, and the others would wait for it.
            self._group.cut()
        came = self._taken == self._round_steps and (self._sampler is None or self._sampler.share > 0)
        places = 0 if self._sampler is None else self._sampler.places
        counting = self._shares.across(
            manager, self._group.members, came=came, samples=self._samples, places=places
        )
        self._buckets.pack(1.0 if came else 0.0)
        self._buckets.average(manager)
        counting.wait()
        if manager.errored() is not None:
            return
        if not self._shares.settle():
            self._nobody = True
            manager.report_error(QuorumError("no group has trained yet"))
        elif (correction := self._shares.correction) != 1:
            for bucket in self._buckets.buckets:
                bucket *= correction

    def _replicated(self) -> Replicated:
        """Of the optimizers only the outer one: each group has gone a way of its own with the other."""
        return Replicated(parameters=super()._replicated().parameters, parts=frozenset({"diloco"}))

    def _keeps_up(self) -> None:
        """A heal is waited for: it is one of many steps."""

    def _begin_together(self, manager: SessionManager) -> None:
        """Nobody of the quorum has anything to be averaged, and all know: they begin a round."""
        manager.forget_votes()
        if self._sampler is not None and manager.current_step() > 0:
            self._sampler.deal_to(self._group.members)
        elif self._sampler is not None:
            # Who comes late does not heal at step 0: it learns at the end of the round how many places were dealt.
            self._sampler.deal_to_first(max(self._group.members, default=0) + 1)
        self._joined = True

    def _commit_round(self, manager: SessionManager, metrics: Mapping[str, float]) -> None:
        first = self._steps_of(int(manager.current_step()) - 1)
        steps = self._committed_steps - first
        self._buckets.unpack()
        self._outer.step()
        self._rates.skip(steps - self._taken)
        self._rates.keep()
        values = dict(metrics)
        if self._shares.samples:
            values["effective_batch"] = float(self._shares.samples)
        if self._sampler is not None:
            self._sampler.deal_to_first(self._shares.places)
            self._sampler.advance(first, self._shares.came, self._group.members, steps=steps)
            values |= {
                "epoch": float(self._sampler.epoch),
                "lost_samples": float(self._sampler.lost_samples),
            }
        self._taken = self._samples = 0
        self._joined = True
        self._tell_commit(manager, values)

    def _back_to_commit(self) -> None:
        self._roll_back()

    def _roll_back(self) -> None:
        if not self._taken:
            return
        logger.warning("%d steps are done again from step %d", self._taken, self._committed_steps)
        self._outer.restore()
        self._rates.restore()
        self._forget_own()

    def _forget_own(self) -> None:
        self._taken = self._samples = 0
        if self._sampler is not None:
            self._sampler.give_back()

    def _replace_parameters(self, state: Mapping[str, Any]) -> None:
        """A heal, or a checkpoint: the way that this group went belongs to other parameters."""
        super()._replace_parameters(state)
        self._outer.keep()
        self._forget_own()

    def _then_keep_rates(self, load: Callable[[Any], None]) -> Callable[[Any], None]:
        def loaded(state: Any) -> None:
            load(state)
            self._rates.keep()

        return loaded
