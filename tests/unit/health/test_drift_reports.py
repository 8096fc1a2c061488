# SPDX-License-Identifier: Apache-2.0
"""An amphora that reports drift is pushed again, with a delay and a limit."""

from itertools import pairwise

from amphora_driver.health.amphora_reports import AmphoraReports, LastReport
from amphora_driver.health.drift_reports import DriftNotice, DriftReports, UnrepairedDrift
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import LastDrift, Report

INTERVAL = 3.0


def heard(at, *words, generation=8, drifted=None):
    return {"am": LastReport(at, at, generation, (1, int(at * 10)), None, words, drifted, read_at=at)}


def among(drifts, at, *words, generation=8, confirmed=8):
    return drifts.find_unrepaired(heard(at, *words, generation=generation), {"am": confirmed}, at)


def test_a_repeated_drift_marks_the_amphora():
    drifts = DriftReports(INTERVAL)
    assert among(drifts, 10.0, "files") == []
    assert among(drifts, 12.9, "files") == []
    assert among(drifts, 13.1, "files") == [UnrepairedDrift("am", 8, "files", replug=False)]


def test_drift_of_an_interface_attaches_it_again():
    drifts = DriftReports(INTERVAL)
    among(drifts, 10.0, "interface", "address")
    assert among(drifts, 14.0, "interface", "address") == [UnrepairedDrift("am", 8, "interface, address", replug=True)]


def test_repeated_pushes_without_success_back_off():
    drifts = DriftReports(INTERVAL)
    among(drifts, 0.0, "files")
    at, pushes = 4.0, []
    while at < 1000.0:
        found = among(drifts, at, "files")
        if found:
            drifts.record_pushes(found, at)
            pushes.append(at)
        at += 3.0
    gaps = [later - before for before, later in pairwise(pushes)]
    assert gaps[0] >= 30.0
    assert all(later >= 1.8 * before for before, later in pairwise(gaps))
    assert 5 <= len(pushes) <= 7


def test_a_report_of_another_generation_is_not_drift():
    drifts = DriftReports(INTERVAL)
    for at in (10.0, 14.0, 18.0):
        assert among(drifts, at, "files", generation=7) == []
        assert among(drifts, at, "files", generation=0, confirmed=0) == []


def test_a_repaired_amphora_is_forgotten_later():
    drifts = DriftReports(INTERVAL)
    among(drifts, 0.0, "files")
    drifts.record_pushes(among(drifts, 4.0, "files"), 4.0)
    assert among(drifts, 7.0) == []
    assert among(drifts, 10.0, "files") == [], "the same drift continues"
    assert among(drifts, 100.0) == []
    assert among(drifts, 101.0, "files") == []
    assert len(among(drifts, 105.0, "files")) == 1


def test_a_drift_is_logged_once():
    drifts = DriftReports(INTERVAL)
    said = heard(10.0, drifted=LastDrift(at=1000000000.0, sentences=("eth1 is down",), repaired=True))
    when = "2001-09-09 01:46:40 UTC"
    assert drifts.find_notices(said, 5.0) == {"am": DriftNotice(when, f"{when}, repaired by its agent: eth1 is down")}
    drifts.record_notices(said, 5.0)
    assert drifts.find_notices(said, 20.0) == {}
    assert drifts.find_notices(heard(10.0), 20.0) == {}
    strange = heard(11.0, drifted=LastDrift(at=1e300, sentences=("x",), repaired=False))
    assert drifts.find_notices(strange, 20.0) == {
        "am": DriftNotice("unknown time", "unknown time, its agent could not repair: x")
    }
    drifts.retain(set())
    assert drifts.find_notices(said, 20.0) != {}


def test_frequent_findings_are_logged_rarely():
    drifts = DriftReports(INTERVAL)
    told = []
    for number in range(100):
        said = heard(number / 10, drifted=LastDrift(at=float(number), sentences=(f"number {number}",), repaired=True))
        told += [each.sentence for each in drifts.find_notices(said, number / 10).values()]
        drifts.record_notices(said, number / 10)
    assert len(told) == 1
    assert drifts.find_notices(said, 10.0)["am"].sentence.endswith("number 99"), "the last finding is not lost"


def marks(drifts, at, *words, marked=(), generation=8):
    """Query the marks first, as the status writer does."""
    said, confirmed = heard(at, *words, generation=generation), {"am": 8}
    found = drifts.find_changed_marks(said, confirmed, set(marked))
    drifts.find_unrepaired(said, confirmed, at)
    return found


def test_a_lasting_drift_is_marked_until_it_ends():
    drifts = DriftReports(INTERVAL)
    assert marks(drifts, 10.0, "files") == {}
    assert marks(drifts, 12.9, "files") == {}, "the agent may repair the drift itself"
    assert marks(drifts, 13.1, "files", generation=7) == {}, "the push of the generation is not finished"
    assert marks(drifts, 13.1, "files") == {"am": True}
    assert marks(drifts, 16.0, "files", marked={"am"}) == {}
    assert marks(drifts, 500.0, marked={"am"}) == {"am": False}
    assert marks(drifts, 503.0, marked={"am"}) == {"am": False}, "the removal of the mark is not written yet"
    assert marks(drifts, 506.0) == {}
    assert marks(drifts, 509.0, marked={"am"}) == {}, "another process has marked the amphora"


def test_marks_of_the_controller_stay():
    drifts = DriftReports(INTERVAL)
    assert marks(drifts, 10.0, marked={"am"}) == {}


def test_drift_after_a_push_is_marked_again():
    drifts = DriftReports(INTERVAL)
    marks(drifts, 10.0, "files")
    found = among(drifts, 14.0, "files")
    drifts.record_pushes(found, 14.0)
    assert marks(drifts, 16.0, "files") == {}
    assert marks(drifts, 18.0, "files") == {"am": True}


def test_the_push_reason_contains_the_time_of_the_finding():
    drifts = DriftReports(INTERVAL)
    among(drifts, 10.0, "files")
    said = heard(14.0, "files", drifted=LastDrift(at=1000000000.0, sentences=("x",), repaired=False))
    (broken,) = drifts.find_unrepaired(said, {"am": 8}, 14.0)
    assert broken.found_at == "2001-09-09 01:46:40 UTC"


def test_heartbeats_that_are_not_read_during_overload_show_no_lasting_drift():
    drifts, reports, confirmed = DriftReports(INTERVAL), AmphoraReports(), {"am": 8}

    def find(at):
        updated = reports.take_updated()
        return drifts.find_changed_marks(updated, confirmed, set()), drifts.find_unrepaired(updated, confirmed, at)

    assert reports.accept(Heartbeat("am", 1, 1, Report(8, drift=("files",))), 10.0)
    assert find(10.0) == ({}, [])
    for order, at in ((2, 14.0), (3, 18.0)):
        assert reports.accept_time("am", (1, order), at)
        assert find(at) == ({}, []), "the drift is that of 10.0"
    assert reports.accept(Heartbeat("am", 1, 4, Report(8, drift=("files",))), 22.0)
    assert find(22.0) == ({"am": True}, [UnrepairedDrift("am", 8, "files", replug=False)])
