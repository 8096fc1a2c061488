# SPDX-License-Identifier: Apache-2.0
"""Lost configurations: an amphora without its generation is marked only after its confirmation has settled."""

from amphora_driver.health.amphora_reports import AmphoraReports, LastReport
from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.lost_configs import LostConfig, LostConfigDetector
from amphora_driver.health.status import Report

INTERVAL = 3.0


def heard(at, generation):
    return {"am": LastReport(at, at, generation, (1, int(at * 10)), read_at=at)}


def among(losses, at, generation, confirmed, now=None):
    return losses.find_lost(heard(at, generation), {"am": confirmed}, at if now is None else now)


def test_a_repeated_report_marks_a_lost_configuration():
    losses = LostConfigDetector(INTERVAL)
    assert among(losses, 10.0, 0, 8) == []
    assert among(losses, 12.9, 0, 8) == []
    assert among(losses, 13.1, 0, 8) == [LostConfig("am", 8, 0)]
    losses.clear([LostConfig("am", 8, 0)])
    assert among(losses, 13.2, 0, 0) == [], "the amphora gets its configuration again"


def test_heartbeats_sent_before_the_confirmation_do_not_count():
    losses = LostConfigDetector(INTERVAL)
    assert among(losses, 10.0, 7, 8, now=10.5) == []
    assert among(losses, 10.6, 7, 8) == [], "another early heartbeat, read late"
    assert among(losses, 11.0, 8, 8) == []
    assert among(losses, 20.0, 7, 8) == [], "the observation restarts"


def test_a_newer_confirmation_restarts_the_observation():
    losses = LostConfigDetector(INTERVAL)
    assert among(losses, 10.0, 7, 8) == []
    assert among(losses, 14.0, 8, 9) == []
    assert among(losses, 16.0, 8, 9) == []
    assert among(losses, 17.1, 8, 9) == [LostConfig("am", 9, 8)]


def test_the_time_starts_when_the_confirmation_is_read():
    losses = LostConfigDetector(INTERVAL)
    assert among(losses, 10.0, 0, 8, now=15.0) == [], "this process was not scheduled for a while"
    assert among(losses, 17.0, 0, 8) == []
    assert among(losses, 18.1, 0, 8) == [LostConfig("am", 8, 0)]


def test_an_unconfirmed_amphora_loses_nothing():
    losses = LostConfigDetector(INTERVAL)
    for at in (10.0, 20.0, 30.0):
        assert among(losses, at, 0, 0) == []


def test_deleted_amphorae_are_forgotten():
    losses = LostConfigDetector(INTERVAL)
    among(losses, 10.0, 0, 8)
    losses.retain(set())
    assert among(losses, 20.0, 0, 8) == []


def test_heartbeats_that_are_not_read_during_overload_show_no_lost_configuration():
    losses, reports = LostConfigDetector(INTERVAL), AmphoraReports()
    assert reports.accept(Heartbeat("am", 1, 1, Report(7)), 10.0)
    assert losses.find_lost(reports.take_updated(), {"am": 8}, 10.0) == []
    for order, at in ((2, 13.0), (3, 16.0), (4, 19.0)):
        assert reports.accept_time("am", (1, order), at)
        assert losses.find_lost(reports.take_updated(), {"am": 8}, at) == [], "the generation is that of 10.0"
    assert reports.accept(Heartbeat("am", 1, 5, Report(7)), 22.0)
    assert losses.find_lost(reports.take_updated(), {"am": 8}, 22.0) == [LostConfig("am", 8, 7)]
