"""What is written down of hosts, and read again."""

from __future__ import annotations

import json

from sky_monarch.provision.requests import Phase, Record, Requests


def test_what_was_written_is_read_again(tmp_path):
    requests = Requests(tmp_path / "requests.json")
    requests.put(Record(host="h0", attempt=2, phase=Phase.LAUNCHING, choice=1), candidates={"round": 1})
    asked = requests.asked_now("h0")
    requests.change("h0", request_id="5f3a")

    again = Requests(tmp_path / "requests.json")
    assert again.get("h0") == Record(
        host="h0", attempt=2, phase=Phase.LAUNCHING, choice=1, request_id="5f3a", asked_ms=asked.asked_ms
    )
    assert again.candidates == {"round": 1}
    assert not again.lost
    again.drop("h0", candidates={})
    assert Requests(tmp_path / "requests.json").get("h0") is None
    assert (tmp_path / "requests.json").stat().st_mode & 0o777 == 0o600


def test_a_field_of_a_later_version_is_passed_over(tmp_path):
    values = {"host": "h0", "attempt": 1, "phase": "up", "colour": "red"}
    (tmp_path / "requests.json").write_text(json.dumps({"hosts": {"h0": values}}))

    assert Requests(tmp_path / "requests.json").get("h0") == Record(host="h0", attempt=1, phase=Phase.UP)


def test_a_damaged_file_is_set_aside_and_that_is_known(tmp_path):
    for damage in ("", "[]", '{"hosts": {"h0": {"phase": "sleeping"}}}', '{"hosts": 3}'):
        (tmp_path / "requests.json").write_text(damage)
        requests = Requests(tmp_path / "requests.json")
        assert requests.lost
        assert requests.get("h0") is None
        assert (tmp_path / "requests.json.damaged").read_text() == damage


def test_a_disk_that_takes_nothing_stops_nothing_and_has_all_with_the_next_change(tmp_path):
    folder = tmp_path / "run"
    requests = Requests(folder / "requests.json")  # the folder is not there: no file can be made

    requests.put(Record(host="h0", attempt=1, phase=Phase.UP))
    assert requests.get("h0") is not None
    folder.mkdir()
    requests.put(Record(host="h1", attempt=1, phase=Phase.UP))
    assert Requests(folder / "requests.json").get("h0") is not None
