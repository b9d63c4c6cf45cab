"""``--inject``."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sky_monarch.config import Injection, parse_injection
from sky_monarch.errors import ConfigError


def test_a_fault_at_a_step_is_read_and_sent_as_the_protocol_has_it():
    injection = parse_injection("kill:replica=1,rank=0,step=30")

    assert injection == Injection(fault="kill", replica=1, rank=0, step=30)
    assert injection.to_wire(4) == {
        "id": 4,
        "slot": {"replica": 1, "rank": 0},
        "fault": "kill",
        "trigger": {"step": 30},
    }


def test_a_fault_after_a_time_is_read_and_sent_as_the_protocol_has_it():
    injection = parse_injection(
        " hang : after=2.5 , replica=0 ".replace(" :", ":"), replicas=1, ranks_per_replica=1
    )

    assert injection == Injection(fault="hang", replica=0, rank=0, after_s=2.5)
    assert injection.to_wire(1)["trigger"] == {"after_s": 2.5}


@given(
    st.sampled_from(["kill", "hang", "exit", "oom"]),
    st.integers(0, 999),
    st.integers(0, 999),
    st.integers(1, 10**8) | st.floats(0, 1e6),
)
def test_every_injection_is_read_back_from_its_text(fault, replica, rank, when):
    timed = isinstance(when, float)
    injection = Injection(
        fault=fault, replica=replica, rank=rank, step=None if timed else when, after_s=when if timed else None
    )

    assert parse_injection(str(injection)) == injection


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "unknown fault"),
        ("kill", "replica is missing"),
        ("kill:", "key=value"),
        ("kil:replica=1,step=3", "did you mean 'kill'"),
        ("KILL:replica=1,step=3", "unknown fault"),
        ("kill:replica=1", "exactly one of step and after"),
        ("kill:replica=1,step=3,after=2", "exactly one of step and after"),
        ("kill:replca=1,step=3", "did you mean 'replica'"),
        ("kill:replica=1,replica=2,step=3", "given twice"),
        ("kill:replica=-1,step=3", "replica must be a whole number from 0"),
        ("kill:replica=1.0,step=3", "replica must be a whole number"),
        ("kill:replica=,step=3", "replica must be a whole number"),
        ("kill:replica=٣,step=3", "replica must be a whole number"),
        ("kill:replica=1,step=0", "step must be a whole number from 1"),
        ("kill:replica=1,step=99999999999999999999", "step must be"),
        ("kill:replica=1,after=-1", "after must be"),
        ("kill:replica=1,after=nan", "after must be"),
        ("kill:replica=1,after=1e999", "after must be"),
        ("kill:replica=1,after=10s", "after must be"),
        ("kill:replica=1,step=3,", "key=value"),
        ("kill:replica=1;step=3", "exactly one of"),
        ("kill:replica=4,step=3", "the job has replica 0 to 3"),
        ("kill:replica=1,rank=1,step=3", "the job has rank 0 only"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_right_form(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_injection(text, replicas=4, ranks_per_replica=1)

    assert words in str(caught.value)
    assert "FAULT:replica=N,rank=N,step=N" in (caught.value.hint or "")


@given(st.text(max_size=40) | st.text("kilhangexto:=,0123456789.-replcstf", max_size=40))
def test_no_text_raises_anything_but_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_injection(str(parse_injection(text))) == parse_injection(text)
