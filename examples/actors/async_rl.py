"""Asynchronous reinforcement learning in one script: generators, a replay buffer, a learner, an evaluator.

    python examples/actors/async_rl.py [--generators 2] [--seconds 10]

A pole stands on a cart; the policy pushes the cart left or right, and gets a reward for each step that the pole has not
fallen. Generators play with weights that are a little old, and go on while the learner learns: it takes the newest
episodes of the buffer, weighs each action by how much more likely it has become since (clipped, as PPO does), and the
weights go back to the generators. An evaluator plays without exploring. No part waits for another: each has a loop of
its own in this script, and the actors do the work in their own processes.
"""

import argparse
import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sky_monarch.actor import Actor, current_rank, endpoint, this_host

FEATURES = 4
CARTS = 16
LONGEST = 200
DISCOUNT = 0.98
LEARNING_RATE = 0.05
CLIP = 0.2
#: Episodes of weights that are older than this many updates are of no use any more.
OLDEST = 20
TIMEOUT_S = 60.0


class Carts:
    """Many poles on carts at once: the classic control problem of Barto, Sutton and Anderson (1983).

    Args:
        seed: Of the first positions.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        """Start all; returns their states (position, speed, angle, angular speed), shape ``(CARTS, FEATURES)``."""
        self.state = self.random.uniform(-0.05, 0.05, size=(CARTS, FEATURES))
        return self.state

    def push(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Push each cart, 0 to the left and 1 to the right, for 20 ms.

        Returns:
            States of shape ``(CARTS, FEATURES)``, and of each whether it has fallen, shape ``(CARTS,)``.
        """
        gravity, cart, pole, half_length, step = 9.8, 1.0, 0.1, 0.5, 0.02
        position, speed, angle, turn = self.state.T
        force = np.where(actions == 1, 10.0, -10.0)
        common = (force + pole * half_length * turn**2 * np.sin(angle)) / (cart + pole)
        inertia = half_length * (4 / 3 - pole * np.cos(angle) ** 2 / (cart + pole))
        spin = (gravity * np.sin(angle) - np.cos(angle) * common) / inertia
        thrust = common - pole * half_length * spin * np.cos(angle) / (cart + pole)
        moved = (position + step * speed, speed + step * thrust, angle + step * turn, turn + step * spin)
        self.state = np.stack(moved, axis=1)
        return self.state, (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21)


def chance_of_right(weights: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Of pushing to the right: states of shape ``(..., FEATURES)``, result of shape ``(...)``."""
    return 1 / (1 + np.exp(-np.clip(states @ weights, -30, 30)))


@dataclass
class Episodes:
    """What a generator has played, one row for each action that counts.

    Attributes:
        version: Of the weights that it played with.
        states: Shape ``(actions, FEATURES)``.
        actions: 0 or 1, shape ``(actions,)``.
        chances: Of the action, by the weights that it played with; shape ``(actions,)``.
        returns: Discounted rewards from there on, less their mean at that time; shape ``(actions,)``.
        length: Mean number of steps until the pole fell.
    """

    version: int
    states: np.ndarray
    actions: np.ndarray
    chances: np.ndarray
    returns: np.ndarray
    length: float


class Generator(Actor):
    """Plays with the weights that it was given last."""

    def __init__(self) -> None:
        self.carts = Carts(seed=current_rank().rank)
        self.random = np.random.default_rng(1000 + current_rank().rank)
        self.version, self.weights = 0, np.zeros(FEATURES)

    @endpoint
    def load(self, version: int, weights: np.ndarray) -> None:
        """Play with these from now on."""
        self.version, self.weights = version, weights

    @endpoint
    def play(self) -> Episodes:
        """Play all carts until each has fallen, or `LONGEST` steps are over."""
        states, actions, chances, alive = [], [], [], [np.ones(CARTS, dtype=bool)]
        state = self.carts.reset()
        while alive[-1].any() and len(states) < LONGEST:
            right = chance_of_right(self.weights, state)
            action = (self.random.random(CARTS) < right).astype(int)
            states.append(state)
            actions.append(action)
            chances.append(np.where(action == 1, right, 1 - right))
            state, fallen = self.carts.push(action)
            alive.append(alive[-1] & ~fallen)
        counts = np.array(alive[:-1])  # (steps, CARTS): was it still standing when it acted?
        returns = np.zeros(counts.shape)
        after = np.zeros(CARTS)
        for at in reversed(range(len(counts))):
            after = counts[at] * (1 + DISCOUNT * after)
            returns[at] = after
        at_that_time = (returns * counts).sum(axis=1) / np.maximum(1, counts.sum(axis=1))
        advantages = returns - at_that_time[:, None]
        return Episodes(
            version=self.version,
            states=np.array(states)[counts],
            actions=np.array(actions)[counts],
            chances=np.array(chances)[counts],
            returns=advantages[counts],
            length=float(counts.sum() / CARTS),
        )


class Buffer(Actor):
    """Keeps the newest episodes, each to be learnt from a few times."""

    def __init__(self, size: int) -> None:
        self.episodes: deque[Episodes] = deque(maxlen=size)
        self.random = np.random.default_rng(0)

    @endpoint
    def add(self, episodes: Episodes) -> None:
        """Take some; the oldest ones go when it is full."""
        self.episodes.append(episodes)

    @endpoint
    def sample(self, number: int, version: int) -> list[Episodes]:
        """Some that are not too old for weights of this version; none if there are too few."""
        fresh = [each for each in self.episodes if version - each.version <= OLDEST]
        if len(fresh) < number:
            return []
        return [fresh[at] for at in self.random.choice(len(fresh), size=number, replace=False)]


class Learner(Actor):
    """Has the weights."""

    def __init__(self) -> None:
        self.version, self.weights = 0, np.zeros(FEATURES)

    @endpoint
    def learn(self, batch: list[Episodes]) -> tuple[int, np.ndarray]:
        """Make actions more likely that went better than others; returns the version, and weights ``(FEATURES,)``."""
        states = np.concatenate([each.states for each in batch])
        actions = np.concatenate([each.actions for each in batch])
        before = np.concatenate([each.chances for each in batch])
        gains = np.concatenate([each.returns for each in batch])
        gains = gains / (gains.std() + 1e-6)
        right = chance_of_right(self.weights, states)
        ratios = np.where(actions == 1, right, 1 - right) / before
        # Beyond the clip there is nothing to be gained: such an action has moved far enough already.
        moved = np.where(gains > 0, ratios > 1 + CLIP, ratios < 1 - CLIP)
        slopes = np.where(moved, 0, ratios * gains)[:, None] * (actions - right)[:, None] * states
        self.weights = self.weights + LEARNING_RATE * len(states) ** 0.5 * slopes.mean(axis=0)
        self.version += 1
        return self.version, self.weights


class Evaluator(Actor):
    """Plays without exploring."""

    @endpoint
    def evaluate(self, weights: np.ndarray) -> float:
        """Mean number of steps until the pole falls, at most `LONGEST`."""
        carts = Carts(seed=99)
        state, alive, steps = carts.reset(), np.ones(CARTS, dtype=bool), 0
        for _ in range(LONGEST):
            steps += alive.sum()
            state, fallen = carts.push((chance_of_right(weights, state) > 0.5).astype(int))
            alive &= ~fallen
        return float(steps / CARTS)


@dataclass
class Progress:
    """What the loops share: the newest weights, and what has come of them."""

    version: int = 0
    weights: np.ndarray = field(default_factory=lambda: np.zeros(FEATURES))
    played: int = 0
    oldest_used: int = 0
    scores: list[float] = field(default_factory=list)
    over: bool = False


async def generate(generators: Any, buffer: Any, progress: Progress) -> None:
    """Let one generator play again and again, always with the newest weights there are."""
    loaded = 0
    while not progress.over:
        if progress.version > loaded:
            loaded = progress.version
            generators.load.broadcast(loaded, progress.weights)
        await buffer.add.call_one(await generators.play.call_one())
        progress.played += 1


async def learn(learner: Any, buffer: Any, progress: Progress) -> None:
    """Let the learner learn from what the buffer has."""
    while not progress.over:
        batch = await buffer.sample.call_one(2, progress.version)
        if not batch:
            await asyncio.sleep(0.01)
            continue
        progress.oldest_used = max(
            progress.oldest_used, progress.version - min(each.version for each in batch)
        )
        progress.version, progress.weights = await learner.learn.call_one(batch)


async def evaluate(evaluator: Any, progress: Progress, seconds: float, good: float) -> None:
    """Say how good the policy is, until it is good or the time is over."""
    deadline = time.monotonic() + seconds
    while not progress.over:
        version = progress.version
        progress.scores.append(await evaluator.evaluate.call_one(progress.weights))
        print(f"version {version}: {progress.scores[-1]:.0f} steps, {progress.played} games played")
        progress.over = progress.scores[-1] >= good or time.monotonic() > deadline
        await asyncio.sleep(0.2)


async def train(generators: int, seconds: float, good: float) -> Progress:
    """Run all loops; returns what has come of it."""
    host = this_host()
    players = host.spawn_procs(per_host={"generators": generators})
    others = host.spawn_procs(per_host={"procs": 3})
    playing = players.spawn("generators", Generator)
    buffer = others.slice(procs=0).spawn("buffer", Buffer, 4 * generators)
    learner = others.slice(procs=1).spawn("learner", Learner)
    evaluator = others.slice(procs=2).spawn("evaluator", Evaluator)
    progress = Progress()
    async with asyncio.timeout(seconds + TIMEOUT_S), asyncio.TaskGroup() as loops:
        for each in range(generators):
            loops.create_task(generate(playing.slice(generators=each), buffer, progress))
        loops.create_task(learn(learner, buffer, progress))
        loops.create_task(evaluate(evaluator, progress, seconds, good))
    await players.stop()
    await others.stop()
    return progress


def main() -> None:
    """Train, and say how much was learnt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    progress = asyncio.run(train(options.generators, options.seconds, good=195))
    print(f"from {progress.scores[0]:.0f} to {max(progress.scores):.0f} steps, in {progress.version} updates")


if __name__ == "__main__":
    main()
