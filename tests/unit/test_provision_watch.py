"""What a status proves, by a clock of the test."""

from __future__ import annotations

import pytest

from sky_monarch.provision.provider import Seen
from sky_monarch.provision.settings import Limits
from sky_monarch.provision.watch import Watch
from tests.support.fake_provider import FakeProvider

LIMITS = Limits(status_s=20.0, confirm_s=10.0)


class Scene:
    """A watch over one host, at seconds since its start."""

    def __init__(self, answers):
        self.provider = FakeProvider()
        self.provider.clusters = {"h0": 1}
        self.provider.answers = {"h0": list(answers)}
        self.up = {"h0": 1}
        self.ended = []
        self.watch = Watch(self.provider, LIMITS, lambda: self.up, lambda *told: self.ended.append(told))
        self.began_s = self.watch._asked_s

    def pass_s(self, until_s, since_s=0):
        """Look once a second; returns when it asked."""
        asked = []
        for second in range(since_s + 1, until_s + 1):
            before = len(self.provider.asked)
            self.watch.look(self.began_s + second)
            asked += [second] * (len(self.provider.asked) - before)
        return asked


@pytest.mark.parametrize("word", [Seen.GONE, Seen.STOPPED])
def test_gone_is_asked_again_after_ten_seconds_and_then_believed(word):
    scene = Scene([word, word])

    assert scene.pass_s(29) == [20]
    assert scene.ended == []
    assert scene.pass_s(30, 29) == [30]
    assert scene.ended == [("h0", 1, f"the provider says that h0 is {word}")]


@pytest.mark.parametrize(
    "answers",
    [
        [Seen.GONE, Seen.UP, Seen.GONE, Seen.INIT],
        [Seen.GONE, Seen.UP, Seen.UNKNOWN, Seen.GONE],
        [Seen.UNKNOWN] * 20,
        [Seen.INIT] * 20,
    ],
)
def test_nothing_else_proves_anything(answers):
    scene = Scene(answers)
    scene.pass_s(59)

    assert scene.ended == []


def test_an_answer_that_fails_is_no_second_word_but_no_doubt_of_the_first_either():
    scene = Scene([Seen.GONE, Seen.UNKNOWN, Seen.UNKNOWN, Seen.GONE])

    assert scene.pass_s(33) == [20, 30, 31, 32]
    assert len(scene.ended) == 1


def test_a_doubt_is_of_one_attempt():
    scene = Scene([Seen.GONE, Seen.GONE])
    scene.pass_s(25)
    scene.up = {"h0": 2}
    scene.pass_s(49, 25)

    assert scene.ended == []


def test_a_silence_that_follows_another_between_two_looks_is_asked_about_anew():
    scene = Scene([])
    scene.watch.doubt({"h0": 1})
    scene.pass_s(60)
    asked = len(scene.provider.early)
    assert asked == LIMITS.early_asks
    scene.watch.doubt({"h0": 1})
    scene.pass_s(70, 60)
    assert len(scene.provider.early) == asked, "said again, it is the same one"
    scene.watch.doubt({})
    scene.watch.doubt({"h0": 1})
    scene.pass_s(71, 70)
    assert len(scene.provider.early) == asked + 1
