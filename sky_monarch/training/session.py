"""The training session: a recipe's loop, and what keeps it going while replicas die and return.

seed_everything(0)
model, optimizer = ...
with Session(model, optimizer, target_step=300, seed=0) as session:
    while session.running:
        loss = ...
        loss.backward()
        session.step_optimizer(metrics={"loss": loss})
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it: a second of CPU that a warm standby pays early

from sky_monarch.errors import ConfigError, QuorumError
from sky_monarch.standby import is_held, wait_for_promotion
from sky_monarch.training.agent_link import AgentLink
from sky_monarch.training.agreement import Agreement
from sky_monarch.training.beginning import all_begin_equal, go_on_from_checkpoint
from sky_monarch.training.collectives import BUCKET_BYTES, GradientBuckets
from sky_monarch.training.contributions import Contributions
from sky_monarch.training.digest import parameters_digest
from sky_monarch.training.drain import Drain
from sky_monarch.training.environment import RankEnvironment
from sky_monarch.training.healing import Replicated
from sky_monarch.training.manager import SessionManager, quiet_torchft
from sky_monarch.training.membership import join_group, make_manager, make_process_group
from sky_monarch.training.rounds import Rounds
from sky_monarch.training.sampler import Sampler
from sky_monarch.training.seeding import batch_generator, seed_everything
from sky_monarch.training.sharding import MODEL, Sharding
from sky_monarch.training.state import TrainingState
from sky_monarch.training.sync import class_for, sync_of
from sky_monarch.training.timeouts import Timeouts
from sky_monarch.training.warmup import warm_up

__all__ = ["Session", "seed_everything"]

# Without an agent nobody says when the donors may leave.
_LINGER_ALONE_S = 2.0
_DONOR_POLL_S = 0.1


class Session:
    """One rank of one replica group, training in step with the others.

    Between two commits any other group may die, heal or join: gradients are averaged over whoever is there,
    a step that a death interrupted is averaged again from the kept local gradients, and a group that comes
    back pulls its state from a donor. Parameters are bit-equal on all groups after every commit.

    Args:
        model: Built after :func:`seed_everything`, so that all groups start from the same bits (checked). May
            be sharded over the ranks of its group: ``fully_shard(model, mesh=inner_mesh())``.
        optimizer: Steps only when the quorum commits.
        target_step: The work is done when this step is committed; None for a loop that ends by itself.
        sampler: Deals out the samples of a dataset, so that none is used twice whoever dies or returns.
        scheduler: One of torch's: stepped after each commit, healed and saved with the optimizer.
        seed: Of the run. The global generators go on with a stream of this rank's own; :meth:`generator`
            adds the step.
        before_update: Called with the step being applied, once the averaged gradients are in place and
            before the optimizer uses them: the place for a learning-rate schedule and for clipping.
            (Earlier, a group that heals does not know its step.)
        retries: How often one step is averaged again from the kept gradients.
        bucket_bytes: Most bytes of one collective.
        timeouts: Longest waits; TorchFT's environment variables are applied on top.
        release_limit_s: Longest stay as a donor after the target step.
        sync: ``every_step``, or ``diloco(20)``; None for the job's. See :mod:`sky_monarch.training.diloco_session`.
        outer_optimizer: Of ``diloco(n)``, over the model's parameters; None for that of the DiLoCo paper.

    Raises:
        ConfigError: An argument, the environment or the timeouts cannot be used; nothing was started.
    """

    def __new__(cls, *_: object, **options: Any) -> Session:  # noqa: D102
        return super().__new__(class_for(cls, options))

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        target_step: int | None = None,
        sampler: Sampler | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        seed: int = 0,
        before_update: Callable[[int], None] | None = None,
        retries: int = 3,
        bucket_bytes: int = BUCKET_BYTES,
        timeouts: Timeouts | None = None,
        release_limit_s: float = 120.0,
        sync: str | None = None,
        outer_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._local_steps, self._outer_optimizer = sync_of(sync), outer_optimizer
        if target_step is not None and target_step < 1:
            raise ConfigError(f"target_step is {target_step}; it must be at least 1")
        if retries < 0:
            raise ConfigError(f"retries is {retries}; it must be at least 0")
        self._env = RankEnvironment.read()
        self._timeouts = Timeouts.derive(timeouts)
        self._sharding = Sharding(model, world_size=self._env.world_size)
        self._state = TrainingState.of(self._env, optimizer)
        self._buckets = GradientBuckets(model.parameters(), bucket_bytes=bucket_bytes)
        self._model, self._optimizer = model, optimizer
        self._target_step, self._seed = target_step, seed
        self._sampler, self._scheduler = sampler, scheduler
        self._before_update = before_update
        self._retries = retries
        self._release_limit_s = release_limit_s
        self._resources = contextlib.ExitStack()
        self._manager: SessionManager | None = None
        self._begun = self._averaged = self._replaced = False
        self._leader = self._leads = False
        self._committed: int | None = None
        self._drain = Drain()
        self.register_state(MODEL, self._replace_parameters, model.state_dict)
        self.register_state("optimizer", optimizer.load_state_dict, optimizer.state_dict)
        for key, part in (("sampler", sampler), ("scheduler", scheduler)):
            if part is not None:
                self.register_state(key, part.load_state_dict, part.state_dict)

    # What a recipe asks.

    @property
    def step(self) -> int:
        """Steps committed so far. A group that heals learns it with its first commit."""
        return 0 if self._manager is None else int(self._manager.current_step())

    @property
    def replica(self) -> int:
        """This replica group, ``0..replicas``."""
        return self._env.replica

    @property
    def replicas(self) -> int:
        """Replica groups of the run, whether they are up or not."""
        return self._env.replicas

    @property
    def rank(self) -> int:
        """This rank inside its group."""
        return self._env.rank

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what is done once, such as an evaluation: one of the last committed step."""
        return self._leader

    @property
    def drain_requested(self) -> bool:
        """Whether this process was asked to leave (SIGTERM, or its agent)."""
        return self._drain.requested

    @property
    def finished(self) -> bool:
        """Whether the target step is committed."""
        return self._target_step is not None and self.step >= self._target_step

    def generator(self, stream: int = 0) -> torch.Generator:
        """Random numbers of this step, replica and rank alone: a step that is done again draws the same.

        Args:
            stream: For a second independent generator of the same step.
        """
        return batch_generator(
            self._seed, step=self.step, replica=self.replica, rank=self.rank, stream=stream
        )

    def digest(self) -> str:
        """SHA-256 of all parameters (sharded: of this rank's shards): equal on all groups after each commit."""
        digest: str = parameters_digest(self._model)
        return digest

    def register_state(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Let a healing group, and checkpoints, carry more than model and optimizer.

        Args:
            key: Any name, the same on all groups.
            load: Applies what ``save`` returned, on another process.
            save: Called in another thread, during the forward pass: what it returns must not change before
                the commit.

        Raises:
            ConfigError: The key is taken, or the session has begun.
        """
        if self._manager is not None:
            raise ConfigError(f"state {key!r} must be registered before the session is entered")
        self._state.add(key, load, save)

    @contextlib.contextmanager
    def pause(self, what: str, limit_s: float = 600.0) -> Iterator[None]:
        """Tell the watchdog of a long stretch without commits, such as an evaluation. May be nested.

        Args:
            what: Shown in status.
            limit_s: After this the watchdog may act after all.
        """
        with self._link.pause(what, limit_s):
            yield

    def weigh(self, loss: torch.Tensor, samples: int | None = None) -> torch.Tensor:
        """What to go backward from where ranks that shard a model may have different numbers of samples.

        Args:
            loss: The mean over them. Several of one step add up.
            samples: How many; None for those of the sampler. To be said here instead of in the step.
        """
        self._in_step()
        return self._contributions.weigh(loss, samples)

    # The loop.

    @property
    def running(self) -> bool:
        """Begin the next step; False when the target step is committed.

        Asks for the quorum, which comes while the recipe computes, and zeroes the gradients.

        Raises:
            SystemExit: With code 0: this process was asked to leave, and is between two steps.
        """
        self._entered()
        self._link.check()
        if self._begun:
            return True
        self._leave_if_asked()
        if self.finished:
            return False
        self._rounds.ask()
        self._contributions.begin()
        self._begun, self._averaged, self._replaced = True, False, False
        self._optimizer.zero_grad()
        return True

    def average_gradients(self, *, samples: int | None = None) -> bool:
        """Average the gradients now, for a recipe that wants to see them before :meth:`step_optimizer`.

        Args:
            samples: As there.

        Returns:
            False if no quorum held long enough, or the group healed to the end of the run; the step is lost.
        """
        manager = self._in_step()
        for attempt in range(self._retries + 1):
            if not self._reduce(manager, samples):
                self._vote(manager)
                if not self._again(manager, attempt):
                    break
                self._rounds.ask()
            else:
                self._buckets.unpack()
                self._averaged = True
                return True
        self._begun = False
        return False

    def step_optimizer(
        self, metrics: Mapping[str, float | torch.Tensor] | None = None, *, samples: int | None = None
    ) -> bool:
        """Average the gradients over the quorum, vote, and step the optimizer if the vote passes.

        Args:
            metrics: Of this step, shown in status: ``loss`` and whatever else is worth a look.
            samples: The weight of this rank's gradients, which are the mean over so many samples (tokens, …). In
                every step on every rank, or never: then those of the sampler, without one all ranks weigh the
                same.

        Returns:
            Whether the step was committed. If not, nothing has changed, and the loop simply goes on.

        Raises:
            QuorumTimeoutError: No quorum formed in time.
            QuorumError: The lighthouse cannot be reached, or nothing was committed in a hundred attempts.
        """
        manager = self._in_step()
        self._link.check()
        for attempt in range(self._retries + 1):
            if not self._averaged:
                self._reduce(manager, samples)
            if self._vote(manager):
                self._commit(manager, metrics or {})
                return True
            if self._kept_up(manager) or not self._again(manager, attempt):
                break
            self._rounds.ask()
        self._begun = False
        return False

    def _again(self, manager: SessionManager, attempt: int) -> bool:
        # Gradients averaged in place cannot be averaged again; kept ones can, as long as the parameters that
        # they belong to are there: not after a heal.
        lost = self._averaged or self._replaced or self.finished or attempt == self._retries
        return self._agreement.again(manager, not lost)

    def _reduce(self, manager: SessionManager, samples: int | None) -> bool:
        """One attempt at averaging; False if it failed, and the vote will then be no."""
        with self._link.waiting():
            self._rounds.wait()
            manager.arrived()
            return self._average(manager, samples)

    def _average(self, manager: SessionManager, samples: int | None) -> bool:
        begins = self.step == 0 and manager.is_participating()
        if self.finished:
            # The donors have reached the target and reduce no more: voting no still applies the state they
            # gave.
            manager.report_error(QuorumError("healed to the target step"))
        elif begins and self._agreement.all(manager.errored() is None) and not self._begin(manager):
            return False
        # What has failed by now reduces nothing, but takes part in what the ranks of its own group do together.
        if manager.errored() is not None and not self.finished:
            # A heal that failed, for one: the others would wait for this member.
            self._group.cut()
        counts = self._contributions
        self._buckets.pack(counts.offer(samples, self._group.members))
        return self._buckets.average(
            manager, inner=self._inner, contributions=counts if counts.offered else None
        )

    def _begin(self, manager: SessionManager) -> bool:
        """Each attempt at step 0, on every member; False where it ends with the state of a checkpoint."""
        if self._state.restore(manager):
            go_on_from_checkpoint(manager, self._group, self._sampler)
            return False
        all_begin_equal(manager, self.digest(), round_steps=self._state.round_steps)
        return True

    def _kept_up(self, manager: SessionManager) -> bool:
        """Where a donor's state is still coming: take the step of the others with what is here of it."""
        following = manager.following
        if following is None:
            return False
        if manager.errored() is None:
            if not self._averaged:
                self._buckets.unpack()
            # The rates of this step, and moments where they come.
            self._optimizer.load_state_dict(following.optimizer_state())
            if self._before_update is not None:
                self._before_update(following.step)
            for name, param in self._model.named_parameters():
                if name not in following.here:
                    param.grad = None
            self._optimizer.step()
            following.applied()
            if not following.lies_in(self._optimizer):
                following.give_up()
        return True

    def _keeps_up(self) -> list[str] | None:
        """Names of the parameters in the order of the optimizer; None where a heal is to be waited for.

        So it is where ranks of a group share a model, or would have to agree on what they have.
        """
        if self._env.world_size > 1 or self._sharding.mesh is not None:
            return None
        names = {id(param): name for name, param in self._model.named_parameters()}
        held = [param for group in self._optimizer.param_groups for param in group["params"]]
        return [names[id(param)] for param in held] if all(id(param) in names for param in held) else None

    def _replace_parameters(self, state: Mapping[str, Any]) -> None:
        """A heal, or a checkpoint: whatever gradients there are belong to other parameters."""
        self._model.load_state_dict(state)
        self._replaced = True

    def _replicated(self) -> Replicated:
        """What all groups have alike after each commit. Parameters that are not trained may be the recipe's to move."""
        trained = {name for name, param in self._model.named_parameters() if param.requires_grad}
        return Replicated(parameters=frozenset(trained), parts=frozenset({"optimizer"}))

    def _vote(self, manager: SessionManager) -> bool:
        with self._link.waiting():
            committed = bool(manager.should_commit())
        if committed:
            self._rounds.passed()
        elif not self.finished and (manager.following is None or manager.errored() is not None):
            self._rounds.failed(self.step)
        return committed

    def _commit(self, manager: SessionManager, metrics: Mapping[str, float | torch.Tensor]) -> None:
        if not self._averaged:
            self._buckets.unpack()
        metrics = {**metrics, **self._contributions.committed(self.step - 1, self._group.members)}
        if self._before_update is not None:
            self._before_update(self.step - 1)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._tell_commit(manager, metrics)

    def _tell_commit(self, manager: SessionManager, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """What is done after each commit, also where this group healed in it."""
        self._begun = self._averaged = False
        self._leads = leads = manager.participating_rank() == 0
        self._leader = leads and self.rank == 0
        self._committed = self.step
        values = {name: float(value) for name, value in metrics.items()} if manager.is_participating() else {}
        values |= self._state.save(manager, self.step, leads=leads)
        if (heal := manager.take_heal()) is not None:
            values |= heal.metrics(self._state.round_steps, most=self.step)
        self._link.committed(self.step, manager.quorum_id, manager.num_participants(), values)

    def _entered(self) -> SessionManager:
        if self._manager is None:
            raise ConfigError("the session is not entered", hint="use it in a `with` statement")
        return self._manager

    def _in_step(self) -> SessionManager:
        manager = self._entered()
        if not self._begun:
            raise ConfigError("no step has begun", hint="loop with `while session.running:`")
        return manager

    # Entering and leaving.

    def __enter__(self) -> Session:
        """Connect to lighthouse, group and agent. The first quorum is asked for by :attr:`running`.

        A standby that runs the script ahead (``recovery.standby_until: session``) waits here until it is
        needed: everything above this line has then been done in advance.

        Raises:
            ConfigError: The lighthouse or the group's store cannot be reached.
            PeerRefusedError: The agent has a newer generation of this group.
            CheckpointError: The state holds something that cannot be handed to a group that heals.
        """
        if self._manager is not None:
            raise ConfigError("a session is entered once")
        quiet_torchft()
        with contextlib.ExitStack() as undo:
            device = next((one.device for one in self._model.parameters()), torch.device("cpu"))
            self._group = make_process_group(self._env, self._timeouts, device)
            if is_held():
                warm_up(self._env.address)
            # torch's modules live as long as the process. Unfrozen, Python searches them for garbage again
            # and again at exit: 1.2 s of CPU against 0.2 s (measured), which a group that fails spends
            # before it can be replaced.
            gc.freeze()
            # A hot standby waits here. Who it is, and what only its generation knows, it learns now.
            if wait_for_promotion():
                self._env = RankEnvironment.read()
            env = self._env
            env.check_identity()
            seed_everything((self._seed + 1) * 1_000_003 + env.replica * 4_099 + env.rank)
            self._contributions = Contributions(
                env, device, self._sampler, seed=self._seed, sharded=self._sharding.mesh is not None
            )
            self._inner, store = join_group(env, self._timeouts)
            self._agreement = Agreement(self._inner, device)
            self._store = store  # ours to keep alive, where this rank serves it
            self._manager = make_manager(env, self._timeouts, self._group, store, undo, device)
            self._rounds = Rounds(
                self._manager,
                self._timeouts,
                self._drain,
                before=self._sharding.note,
                late=lambda: self._link.wait_on(),
            )
            self._state.hand_to(self._manager, self._sharding, self._replicated())
            if (names := self._keeps_up()) is not None:
                self._manager.keep_up(names)
            self._state.join(store[:2], env.generation, undo)
            self._link = AgentLink(
                env,
                target_step=self._target_step,
                on_dead=self._group.declare_dead,
                wait_limits_s=self._timeouts.waits_s,
            )
            undo.callback(self._link.close)
            self._drain.listen(undo)
            self._resources = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the quorum; after the target step first stay as a donor until nobody needs one."""
        try:
            if kind is None:
                with self.pause("saving a checkpoint", self._release_limit_s):
                    self._link.add(self._state.flush(self._release_limit_s))
            if kind is None and self._target_step is not None and self.finished:
                self._stay_as_donor(self._entered())
            if kind is not None:
                self._group.cut()  # the others need not wait for the end of this process
            if kind is SystemExit and self.drain_requested:
                self._save_before_the_end()
        finally:
            self._resources.close()

    def _leave_if_asked(self) -> None:
        """Between two steps. Ranks that save together before they go leave together, after the same step."""
        together = self._state.saves and self._env.world_size > 1
        if together and not self._agreement.all(not self.drain_requested):
            self._drain.ask()
        self._drain.leave_if_requested()

    def _save_before_the_end(self) -> None:
        """The host is about to be taken away: save what goes with it.

        That is so where the job wants it and this group leads; in any case where no group stays that has the state.
        """
        always = self._state.saves_on_notice
        if not self._state.saves or (always and not self._leads):
            return
        limit_s = self._link.time_to_save()
        self._back_to_commit()
        # A heal that was under way has set the manager's step ahead of what the parameters are.
        if limit_s > 0 and self.step == self._committed and not self._entered().torn:
            self._link.leave(limit_s)
            if not always:
                limit_s = self._link.time_if_last(limit_s, otherwise=self._leads)
        if limit_s > 0 and self.step == self._committed:
            self._link.add(self._state.save_now(self._entered(), self.step, limit_s))

    def _back_to_commit(self) -> None:
        """Undo what was done since the last commit; nothing is, between the commits of single steps."""

    def _stay_as_donor(self, manager: SessionManager) -> None:
        """Answer quorums, so that a group that is still on its way can heal to the end, until released."""
        self._link.done(self.step)
        alone = self.replicas == 1
        limit_s = self._release_limit_s if self._link.connected else (0.0 if alone else _LINGER_ALONE_S)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.drain_requested:
            if not manager.quorum_pending:
                manager.forget_quorum()
                manager.forget_votes()
                manager.start_quorum()
            if self._link.released.wait(_DONOR_POLL_S):
                return
