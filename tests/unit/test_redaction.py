"""No value that a run must keep to itself leaves in any form."""

from __future__ import annotations

import base64
import json
import shlex
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from sky_monarch.launch.redaction import Redactor

SECRET = "cäna/ry+ 7'2\"61&x"
PRIVATE = {
    "token": "t0ken-of-this-run",
    "base_env": {"HOME": "/home/me", "PATH": "/usr/bin", "GH_CREDS": "gh-creds-8", "SHORT": "1"},
    "envs": {"MODE": "turbo-9", "N": "1"},
    "secrets": {"KEY": SECRET, "PIN": "x7", "EMPTY": ""},
    "identities": {
        "agent": {"name": "local", "ca_pem": "PUBLIC", "key_pem": "line-one-of-it\nline-two-of-it"}
    },
}


def basic(before: str) -> bytes:
    return base64.b64encode((before + SECRET).encode())


@pytest.mark.parametrize(
    "form",
    [
        SECRET.encode(),
        quote(SECRET, safe="").encode(),
        quote(SECRET, safe="").lower().encode(),
        quote(SECRET).encode(),
        quote_plus(SECRET).encode(),
        json.dumps(SECRET).encode(),
        json.dumps(SECRET, ensure_ascii=False).encode(),
        json.dumps(json.dumps(SECRET)).encode(),
        repr(SECRET).encode(),
        base64.b64encode(SECRET.encode()),
        base64.urlsafe_b64encode(SECRET.encode()),
        basic(""),
        basic("u:"),
        basic("me:"),
        basic("user"),
        SECRET.encode().hex().encode(),
        b"t0ken-of-this-run",
        b"turbo-9",
        b"gh-creds-8",
        b"line-two-of-it",
    ],
)
def test_a_value_is_found_in_every_form(form: bytes) -> None:
    redactor = Redactor(PRIVATE)
    left = redactor.bytes(b"before " + form + b" after")
    assert redactor.replaced
    assert left.startswith(b"before ")
    assert left.endswith(b" after")
    longest = form.strip(b"\"'\\")
    assert not any(longest[i : i + 8] in left for i in range(max(1, len(longest) - 7))), left


@pytest.mark.parametrize("secret", ["pw-4", "ab-42", "hunter2\n", "  padded\n"])
@pytest.mark.parametrize(
    "form",
    [
        str,
        shlex.quote,
        quote,
        lambda text: repr(text.encode()),
        lambda text: text.encode().hex(),
        lambda text: base64.b64encode(text.encode()).decode(),
        lambda text: base64.b64encode(f"me:{text}".encode()).decode(),
    ],
)
def test_a_value_is_found_however_short_it_is_and_whatever_is_stripped_of_it(
    secret: str, form: Callable[[str], str]
) -> None:
    redactor = Redactor({"secrets": {"KEY": secret}})
    for text in (secret, secret.strip()):
        left = redactor.text(form(text))
        own = form(text).strip("'\"\n b=")
        assert not any(own[at : at + 5] in left for at in range(max(1, len(own) - 4))), left


def test_a_quote_in_a_value_is_found_as_shells_and_bytes_have_it() -> None:
    secret = "it's-mé"
    redactor = Redactor({"secrets": {"KEY": secret}})
    for form in (shlex.quote(secret), secret.replace("'", "'\\''"), repr(secret.encode())):
        assert "it" not in redactor.text(form)


def test_json_stays_json_whatever_its_names_and_numbers_look_like() -> None:
    redactor = Redactor({"envs": {"BATCH": "1024"}, "secrets": {"KEY": "cänary", "PIN": "7"}})
    value = {"mean_token_accuracy": 0.5, "n": 1024, "of": 7, "text": "cänary at 1024, pin 7"}
    kept = {**value, "text": "[secret] at [env], pin [redacted]"}
    assert json.loads(redactor.json(json.dumps(value).encode())) == kept
    lines = b"".join(json.dumps(value).encode() + b"\n" for _ in range(2)) + b'{"cut": "c\xc3\xa4nary'
    *whole, cut = redactor.json(lines).splitlines()
    assert [json.loads(line) for line in whole] == [kept, kept]
    assert cut == b'{"cut": "[secret]'


def test_ordinary_text_stays_as_it_is() -> None:
    text = (
        "step 1 of 10: loss 2.5, tokens_per_s: 1234, tokenizer=bpe from /home/me/x via /usr/bin/python; "
        "author: me; https://example.org/a?b=c PUBLIC"
    )
    assert Redactor(PRIVATE).text(text) == text


def test_a_short_secret_is_replaced_as_a_word_only() -> None:
    assert Redactor(PRIVATE).text("pin x7, ax7b") == "pin [redacted], ax7b"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("train.py --api-key=abc-1 --lr 3", "train.py --api-key=[redacted] --lr 3"),
        ("train.py --hub-token abc-1 --lr 3", "train.py --hub-token [redacted] --lr 3"),
        ("WANDB_API_KEY=abc-1 python x.py", "WANDB_API_KEY=[redacted] python x.py"),
        ("{'password': 'a b c', 'n': 1}", "{'password': [redacted], 'n': 1}"),
        ("s3://me:abc-1@host/b and http://tok@h", "s3://[userinfo]@host/b and http://[userinfo]@h"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer [redacted]"),
        ("using hf_abcdefghijklmnop", "using [redacted]"),
        ("KEY: abc-1, MINE=abc-1", "KEY: abc-1, MINE=[redacted]"),
    ],
)
def test_what_looks_like_a_secret_goes_though_nobody_knows_it(text: str, left: str) -> None:
    assert Redactor(None, names=["MINE"]).text(text) == left


def test_a_key_without_its_end_is_no_loophole() -> None:
    text = "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n"
    assert Redactor(None).text(text) == "a\n[private key]"


def test_where_values_are_unknown_free_text_is_left_out_of_documents() -> None:
    event = {
        "event": "rank_exited",
        "tail": ["who knows"],
        "exit": {"code": 1},
        "reason": "who knows",
        "oom": True,
    }
    assert Redactor(None).value(event) == {
        "event": "rank_exited",
        "tail": ["[left out]"],
        "exit": {"code": 1},
        "reason": "[left out]",
        "oom": True,
    }
    assert Redactor(PRIVATE).value(event) == event


def test_the_time_it_takes_grows_with_the_text_and_no_faster() -> None:
    """A line may be megabytes of anything that a name, an address or a number could begin with."""
    redactor = Redactor(PRIVATE, names=["MODE"])
    for line in (
        "a1" * (1 << 19),
        "token" * (1 << 17),
        "-" * (1 << 19),
        "a://" * (1 << 17),
        "eyJ." * (1 << 17),
    ):
        began_s = time.process_time()
        redactor.text(line)
        assert time.process_time() - began_s < 5
