"""The same for what failures leave: their evidence, and the bundle of it."""

from __future__ import annotations

from tests.support.mutant import replaced

_EVIDENCE = "test_evidence.py::"
_REGISTER = "faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)"

TOLD = [
    # A rank that hangs does not know the signal; it must not be sent then, for it would end the rank.
    replaced(
        "stacks.py",
        _REGISTER,
        "pass",
        f"{_EVIDENCE}test_each_failure_says_where_and_with_what_numbers",
        "assert None == ",
    ),
    replaced(
        "tracebacks.py",
        "exception=exception, where=own or library)",
        "exception=exception, where=library or own)",
        f"{_EVIDENCE}test_each_failure_says_where_and_with_what_numbers",
        "not the line in json",
    ),
    replaced(
        "controller/evidence.py",
        'culprit(event.get("traceback") or tail)',
        "culprit(tail)",
        f"{_EVIDENCE}test_a_script_decorated_with_record_tells_its_exception_though_it_prints_nothing",
        "assert None == 'RuntimeError",
    ),
    replaced(
        "training/transport.py",
        "heal, self._heal = self._heal, None",
        "heal = None",
        "test_training_runs.py::test_a_killed_group_comes_back_from_its_standby_and_all_end_bit_equal",
        "assert None in",
    ),
    replaced(
        "controller/controller.py",
        "if self._book.recoveries.awaits(progress):",
        "if False:",
        "test_training_runs.py::test_a_killed_group_comes_back_from_its_standby_and_all_end_bit_equal",
        "NoneType",
    ),
    replaced(
        "launch/folder.py",
        "            excerpt.keep(self)\n",
        "            del excerpt\n",
        "test_debug_bundle.py::test_a_bundle_of_a_live_a_lost_and_an_ended_run_tells_all_but_its_secrets",
        "KeyError: 'logs/r0-0/g1.log'",
    ),
]
