"""DiLoCo's arithmetic: how far each group came by itself is averaged, and is the gradient of an outer step.

https://arxiv.org/abs/2311.08105. The same numbers as TorchFT's ``local_sgd.DiLoCo`` with one fragment, in parts
that a session can fail half-way through and do again (docs/decisions/0006-diloco.md).
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from sky_monarch.errors import ConfigError
from sky_monarch.training.environment import RankEnvironment

if TYPE_CHECKING:
    from torchft import Manager

__all__ = ["InnerRates", "Outer", "Shares"]

# Of the paper, section 3.1.
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9


class Outer:
    """The parameters that all groups had in common last, and the optimizer that moves them on.

    Args:
        model: Trained in place by the inner optimizer between two outer steps.
        inner: That one.
        optimizer: Over the model's parameters; None for SGD with Nesterov's momentum.

    Raises:
        ConfigError: ``optimizer`` holds other parameters, or ``model.state_dict()`` leaves some out.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model = model
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._kept: list[torch.Tensor] = []
        if optimizer is None:
            optimizer = torch.optim.SGD(self._params, lr=_OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True)
        self.optimizer: torch.optim.Optimizer = optimizer
        trained = {id(param) for param in self._params}
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if optimizer is inner or held != trained:
            raise ConfigError(
                "outer_optimizer must be a second optimizer, over exactly the parameters that are trained",
                hint="outer_optimizer=torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)",
            )
        if trained - {id(value) for value in model.state_dict(keep_vars=True).values()}:
            raise ConfigError(
                "model.state_dict() leaves out parameters that are trained, so no group could heal"
            )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def keep(self) -> None:
        """The parameters are what all groups have in common: remember them."""
        if not self._kept:
            self._kept = [param.detach().clone() for param in self._params]
            return
        for kept, param in zip(self._kept, self._params, strict=True):
            kept.copy_(param)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def restore(self) -> None:
        """Go back to what :meth:`keep` remembered."""
        for kept, param in zip(self._kept, self._params, strict=True):
            param.copy_(kept)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_pseudogradients(self) -> None:
        """In place of each gradient, the way that its parameter went since, backwards."""
        for kept, param in zip(self._kept, self._params, strict=True):
            param.grad = kept - param

    def step(self) -> None:
        """Move the common parameters by the gradients, which are the averaged ways, and keep the new ones."""
        self.restore()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.keep()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The common parameters, for a moment, where the group's own are."""
        with torch.no_grad():
            own = [param.detach().clone() for param in self._params]
            self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for value, param in zip(own, self._params, strict=True):
                    param.copy_(value)

    def model_state(self) -> dict[str, Any]:
        """The model's state with the common parameters; buffers are the group's own."""
        common = {id(param): kept for param, kept in zip(self._params, self._kept, strict=True)}
        state: dict[str, Any] = self._model.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = common.get(id(value), value.detach())
        return state


class InnerRates:
    """What of the inner optimizer goes back with a round: its rates, and the place of the schedule.

    Its moments do not, as in TorchFT: a copy of them would cost as much memory as all the rest.

    Args:
        optimizer: The inner one.
        scheduler: Of its rates, if any.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler | None
    ) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self.keep()

    def keep(self) -> None:
        """Remember them: a round begins."""
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._place = None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())

    def restore(self) -> None:
        """The round is done again."""
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name, value in kept.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = copy.deepcopy(value)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(self._place))

    def skip(self, steps: int) -> None:
        """So many steps of the schedule that others took, and this group did not."""
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the steps of the optimizer: they were others'
            for _ in range(steps):
                self._scheduler.step()

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state, with the rates of the beginning of the round."""
        state = self._optimizer.state_dict()
        groups = zip(state["param_groups"], self._groups, strict=True)
        return {**state, "param_groups": [{**packed, **kept} for packed, kept in groups]}

    def schedule_state(self) -> Any:
        """The scheduler's, likewise."""
        return self._place


class Shares:
    """Which groups came to the end of a round, and with how many samples; summed up beside their ways.

    TorchFT divides by all members of the quorum that are at its step. Who was replaced in the middle of the round
    is one of them, came nowhere, and must not shorten the step of the others.

    Args:
        env: This rank's place.
        device: Of the parameters.
    """

    def __init__(self, env: RankEnvironment, device: torch.device) -> None:
        self._replica = env.replica
        self._device = device
        self._members: list[int] = []
        self._counts = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self._participants = 0
        self.came: dict[int, int] = {}
        self.samples = self.places = 0

    def across(
        self, manager: Manager, members: Sequence[int], *, came: bool, samples: int, places: int
    ) -> dist.Work:
        """Begin to sum up over the groups; one that heals counts nothing.

        Args:
            manager: Its quorum has come.
            members: Groups of that quorum, which all of them know alike: not of the run, which may be scaled.
            came: Whether this group has taken all steps of the round, from the common parameters.
            samples: That it used.
            places: Places that each step of the round was dealt to, which who came knows and others may not.
        """
        self.came, self.samples, self.places = {}, 0, 0
        self._members = list(members)
        self._counts = torch.zeros(3, len(self._members), dtype=torch.int64, device=self._device)
        if came:
            mine = torch.tensor([1, samples, places], dtype=torch.int64, device=self._device)
            self._counts[:, self._members.index(self._replica)] = mine
        self._participants = manager.num_participants()
        return manager.allreduce(self._counts, reduce_op=dist.ReduceOp.SUM)

    def settle(self) -> bool:
        """Read what the others counted, once it has come; False if nobody has anything to be averaged."""
        came: list[int]
        came, samples, places = self._counts.tolist()
        self.came = dict(zip(self._members, came, strict=True))
        self.samples, self.places = sum(samples), max(places, default=0)
        return sum(came) > 0

    @property
    def correction(self) -> float:
        """By what the average over the members is multiplied, to be one over those that came."""
        return self._participants / sum(self.came.values())
