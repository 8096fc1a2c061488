# SPDX-License-Identifier: Apache-2.0
"""The agent's drift check: detection, repair and back-off."""

import hashlib
import itertools
import json

import pytest

from amphora_agent.apply import confirmed_bundle
from amphora_agent.apply.file_sets import FileSets
from amphora_agent.bundle import File
from amphora_agent.drift import repair
from amphora_agent.drift.repair import DriftRepair
from amphora_agent.drift.report import Difference, DriftReport, seen_twice
from amphora_agent.errors import MachineError
from amphora_agent.haproxy import runtime_state
from amphora_agent.paths import Paths

FILE, LINK = Difference("haproxy.cfg", "it was edited"), Difference("interface", "eth1 is gone")


class Machine:
    """Successive checks; a check after a repair finds what the repair left."""

    def __init__(self, *looks):
        self.looks = list(looks)
        self.repaired = []
        self.error = None
        self.generation = 1

    def differences(self):
        return self.looks.pop(0) if self.looks else ()

    def repair(self, found):
        self.repaired.append(tuple(found))
        if self.error is not None:
            raise self.error


@pytest.fixture
def audited(monkeypatch):
    monkeypatch.setattr(repair.time, "sleep", lambda _seconds: None)
    told = []

    def make(*looks):
        machine, drift = Machine(*looks), DriftReport()
        return machine, drift, DriftRepair(machine, drift, 1.0, lambda: told.append(1)), told

    return make


def test_an_amphora_without_differences_reports_no_drift(audited):
    machine, drift, auditor, told = audited((), ())
    auditor.check_and_repair()
    assert (machine.repaired, told, drift.heartbeat()) == ([], [], {})
    assert drift.document() == {"last": None, "unrepaired": [], "counts": {}, "checks": 1}


@pytest.mark.parametrize("second", [(), None, (LINK,)])
def test_a_difference_in_one_check_only_is_not_reported(audited, second):
    machine, drift, auditor, _ = audited((FILE,), second)
    auditor.check_and_repair()
    assert (machine.repaired, drift.heartbeat()) == ([], {})


def test_a_check_during_a_change_reports_nothing(audited):
    machine, drift, auditor, _ = audited(None)
    drift.record((LINK,), (LINK,))
    auditor.check_and_repair()
    assert (machine.repaired, [one.kind for one in drift.unrepaired]) == ([], ["interface"])


def test_a_difference_in_two_checks_is_repaired_and_reported(audited):
    machine, drift, auditor, told = audited((FILE,), (FILE,), ())
    auditor.check_and_repair()
    assert (machine.repaired, len(told)) == ([(FILE,)], 1)
    said = drift.heartbeat()
    assert "drift" not in said
    assert (said["drifted"]["kinds"], said["drifted"]["repaired"]) == (["haproxy.cfg"], True)


def test_repairs_of_a_lasting_difference_back_off(audited):
    machine, drift, auditor, _ = audited(*[(LINK,)] * 200)
    machine.error = MachineError("mend", "no")
    for _ in range(40):
        auditor.check_and_repair()
    assert drift.heartbeat()["drift"] == ["interface"]
    assert 4 <= len(machine.repaired) <= 8
    assert drift.document()["counts"] == {"interface": 1}
    machine.looks = []
    auditor.check_and_repair()
    assert "drift" not in drift.heartbeat()
    assert drift.heartbeat()["drifted"]["repaired"] is False, "the report contains the last difference"


def test_repairs_of_a_returning_difference_back_off(audited):
    """A foreign program rewrites the file repeatedly: HAProxy starts a new worker each time."""
    machine, drift, auditor, _ = audited()
    said = []

    def look():
        machine.looks = [(FILE,), (FILE,), ()]
        before = len(machine.repaired)
        auditor.check_and_repair()
        said.append(drift.heartbeat().get("drift"))
        return len(machine.repaired) > before

    repaired = [look() for _ in range(80)]
    at = [number for number, one in enumerate(repaired) if one]
    assert [b - a for a, b in itertools.pairwise(at)] == [2, 4, 8, 16, 16, 16, 16]
    assert [said[number] for number in range(80) if not repaired[number]] == [["haproxy.cfg"]] * (80 - len(at))
    assert {said[number] is None for number in at} == {True}, "the amphora is as confirmed at present"


def test_a_late_return_of_a_difference_is_repaired_at_once(audited, monkeypatch):
    machine, drift, auditor, _ = audited()
    now = 1000.0
    monkeypatch.setattr(repair.time, "monotonic", lambda: now)
    for _ in range(4):
        machine.looks = [(FILE,), (FILE,), ()]
        auditor.check_and_repair()
    assert (len(machine.repaired), drift.heartbeat()["drift"]) == (2, ["haproxy.cfg"])
    machine.looks = [()]
    auditor.check_and_repair()
    assert "drift" not in drift.heartbeat()
    for _ in range(2):
        now += 11.0
        machine.looks = [(FILE,), (FILE,), ()]
        auditor.check_and_repair()
    assert len(machine.repaired) == 4
    machine.looks = [(LINK,), (LINK,), ()]
    auditor.check_and_repair()
    assert len(machine.repaired) == 5, "another difference has its own back-off"
    machine.generation = 2
    machine.looks = [(LINK,), (LINK,), ()]
    auditor.check_and_repair()
    assert len(machine.repaired) == 6, "the bundle changed meanwhile"


def test_reported_sentences_are_short():
    drift = DriftReport()
    drift.record([Difference("route", "x" * 5000)] * 50, ())
    assert len(json.dumps(drift.heartbeat())) < 1500


def test_seen_twice_keeps_the_sentences_of_the_later_check():
    later = Difference("haproxy.cfg", "later")
    assert seen_twice((FILE, LINK), (later,)) == (later,)


def test_a_file_is_damaged_until_its_content_is_restored(tmp_path):
    paths = Paths(tmp_path)
    paths.run.mkdir(parents=True)
    name = "tls/11111111-0000-4000-8000-000000000000/a.pem"
    files = (File(name, hashlib.sha256(b"right").hexdigest(), "right"),)
    sets = FileSets(paths)
    place = sets.create(files)
    assert sets.damaged(files) == []
    (place / name).write_text("wrong")
    assert sets.damaged(files) == sets.damaged(files) == [name]
    (place / name).unlink()
    assert sets.damaged(files) == [name]
    sets.invalidate()
    assert sets.create(files) == place
    assert sets.damaged(files) == []


def test_edited_text_differs_from_the_confirmed_one(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("listen\n")
    bad.write_text("listen to me\n")
    digest = hashlib.sha256(b"listen\n").hexdigest()
    assert confirmed_bundle._read_text((bad, good), digest) == "listen\n"
    assert confirmed_bundle._read_text((tmp_path / "none", good), None) == "listen\n", "an older agent stored no digest"
    with pytest.raises(ValueError, match="modified"):
        confirmed_bundle._read_text((bad,), digest)


def test_disabled_listeners_are_a_difference():
    def row(name, kind, state):
        return ",".join([name, kind, *[""] * 15, state, ""])

    names = [("a", "OPEN"), ("b", "STOP"), ("c", "FULL"), ("amphora:x", "STOP")]
    said = [row(name, "FRONTEND", state) for name, state in names]
    assert runtime_state.closed_listeners("\n".join([*said, row("d", "BACKEND", "DOWN")])) == ["b"]
