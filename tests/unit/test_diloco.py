"""Outer steps without processes: who makes which session, the arithmetic, and what goes back with a round."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import nn

from sky_monarch.errors import ConfigError
from sky_monarch.training import Sampler, Session
from sky_monarch.training.diloco import InnerRates, Outer
from sky_monarch.training.diloco_session import DilocoSession
from sky_monarch.training.state import TrainingState

pytestmark = pytest.mark.torch


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()


def test_the_scripts_word_counts_before_the_jobs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert type(Session(*parts())) is Session
    assert type(Session(*parts(), sync="every_step")) is Session
    assert isinstance(Session(*parts(), sync="diloco(3)"), DilocoSession)
    monkeypatch.setenv("SKY_MONARCH_SYNC", "diloco(5)")
    by_job = Session(*parts())
    assert isinstance(by_job, DilocoSession)
    assert by_job._local_steps == 5
    with caplog.at_level(logging.WARNING):
        assert type(Session(*parts(), sync="every_step")) is Session
    assert "the job says sync: diloco(5), the script every_step" in caplog.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sync": "diloco"}, "sync must be every_step or diloco"),
        ({"outer_optimizer": "given"}, "groups average in each step"),
        ({"sync": "diloco(2)", "outer_optimizer": "given"}, "over exactly the parameters that are trained"),
    ],
)
def test_what_a_session_cannot_do_is_refused(options: dict[str, object], named: str) -> None:
    if "outer_optimizer" in options:
        options = {**options, "outer_optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)}
    with pytest.raises(ConfigError, match=named):
        Session(*parts(), **options)


def test_a_class_of_the_scripts_own_is_not_left_without_its_outer_steps() -> None:
    class Own(Session):
        pass

    class OwnDiloco(DilocoSession):
        pass

    with pytest.raises(ConfigError, match=r"Own cannot do sync: diloco\(4\)"):
        Own(*parts(), sync="diloco(4)")
    assert type(Own(*parts())) is Own
    assert type(OwnDiloco(*parts(), sync="diloco(4)")) is OwnDiloco


def test_an_outer_step_of_sgd_without_momentum_at_rate_one_goes_all_the_way() -> None:
    model, optimizer = parts()
    outer = Outer(model, optimizer, torch.optim.SGD(model.parameters(), lr=1.0))
    outer.keep()
    begun = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer)
    gone = [param.detach().clone() for param in model.parameters()]
    outer.set_pseudogradients()
    with outer.in_place():
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), begun, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), gone, strict=True))
    outer.step()
    for param, other in zip(model.parameters(), gone, strict=True):
        torch.testing.assert_close(param.detach(), other, rtol=0, atol=1e-7)
    assert all(param.grad is None for param in model.parameters())


def test_a_donor_in_the_middle_of_a_round_gives_what_all_groups_have_in_common() -> None:
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    outer, rates = Outer(model, optimizer), InnerRates(optimizer, scheduler)
    outer.keep()
    common = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer)
    scheduler.step()
    state = outer.model_state()
    assert list(state) == list(common)
    for name, _ in model.named_parameters():
        assert torch.equal(state[name], common[name])
        assert not state[name].requires_grad
    assert torch.equal(state["1.running_mean"], model[1].running_mean), "buffers are the group's own"
    assert not torch.equal(state["1.running_mean"], common["1.running_mean"])
    given = rates.optimizer_state()
    assert given["param_groups"][0]["lr"] == 1e-2
    assert given["state"][0]["step"] == 2
    assert rates.schedule_state()["last_epoch"] == 0

    _, its_optimizer = parts()
    its_schedule = torch.optim.lr_scheduler.ExponentialLR(its_optimizer, 0.5)
    its_optimizer.load_state_dict(given)
    its_schedule.load_state_dict(rates.schedule_state())
    InnerRates(its_optimizer, its_schedule).skip(1)
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 5e-3


def test_a_round_that_is_done_again_begins_with_the_same_rates() -> None:
    model, optimizer = parts()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates, held = InnerRates(optimizer, scheduler), optimizer.param_groups[0]["lr"]
    for _ in range(3):
        train(model, optimizer, 1)
        scheduler.step()
    assert held.item() == 0.0625
    rates.restore()
    assert optimizer.param_groups[0]["lr"] is held
    assert (held.item(), scheduler.last_epoch) == (0.5, 0)


@pytest.mark.parametrize("seed", range(10))
def test_no_history_of_rounds_deaths_and_heals_commits_a_sample_twice(seed: int) -> None:
    dice = random.Random(seed)
    replicas, world_size, steps = dice.randint(2, 4), dice.randint(1, 2), dice.randint(1, 6)

    def group(replica: int) -> list[Sampler]:
        ranks = [Sampler(997, 4) for _ in range(world_size)]
        for rank, one in enumerate(ranks):
            one.bind(seed=3, replica=replica, replicas=replicas, rank=rank, world_size=world_size)
            one.deal_to_first(replicas)  # as at the begin of a round that nobody has trained in
        return ranks

    live = {replica: group(replica) for replica in range(replicas)}
    committed: list[int] = []
    for first in range(0, 40 * steps, steps):
        drawn: dict[int, list[int]] = {replica: [] for replica in live}
        for _ in range(steps):
            for replica, ranks in live.items():
                drawn[replica] += [one.batch_number for one in ranks]
                for one in ranks:
                    one.take()
        if dice.random() < 0.2:  # nobody could commit: all go back
            for ranks in live.values():
                for one in ranks:
                    one.give_back()
            continue
        while dice.random() < 0.2 and len(live) > 1:
            live.pop(dice.choice(sorted(live)))
        came = {replica: int(replica in live) for replica in range(replicas)}
        donor = live[min(live)][0].state_dict()
        for replica in range(replicas):
            if replica not in live and dice.random() < 0.5:
                live[replica] = group(replica)
                for one in live[replica]:
                    one.load_state_dict(donor)
        for replica in live:
            committed += drawn[replica] if came[replica] else []
        states = []
        for ranks in live.values():
            for one in ranks:
                one.advance(first, came, sorted(live), steps=steps)
                states.append(one.state_dict())
        assert all(state == states[0] for state in states)
    lost = [batch.number for batch in live[min(live)][0].lost]
    dealt = sorted(committed + lost)
    assert dealt == list(range(len(dealt))), "every batch was committed once, or is listed"


def test_batches_of_which_nobody_is_left_are_dealt_to_who_is_there() -> None:
    sampler = Sampler(100, 4)
    sampler.bind(seed=0, replica=1, replicas=3, rank=0, world_size=1)
    sampler.deal_to_first(3)
    sampler.advance(0, {0: 1, 2: 1}, [0, 2], steps=5)
    assert sampler.share == 0
    number = sampler.state_dict()["cursor"]
    sampler.deal_to([1])
    assert (sampler.share, sampler.batch_number) == (4, number)


def test_a_checkpoint_says_how_many_steps_a_round_had() -> None:
    state = TrainingState(None)
    saved = {"step": 6, "batches_committed": 18, "round_steps": 5}
    assert state._in_rounds(saved)["step"] == 30
    state.round_steps = 10
    assert state._in_rounds(saved)["step"] == 3
    assert state._in_rounds({"step": 40, "batches_committed": 1})["step"] == 4, "of a version before this one"
    short = {"step": 3, "batches_committed": 9, "round_steps": 20, "steps": 50}
    assert state._in_rounds(short)["step"] == 5, "its last round was a shorter one"
    state.round_steps = 20
    with pytest.raises(ConfigError, match="of step 50, where no round of 20 steps ends"):
        state._in_rounds(short)
    state.last_step = 50
    assert state._in_rounds(short)["step"] == 3
    with pytest.raises(ConfigError, match="of step 30, where no round of 20 steps ends"):
        state._in_rounds(saved)
