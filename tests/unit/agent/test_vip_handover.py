# SPDX-License-Identifier: Apache-2.0
"""Failed hand-overs of VIPs leave no rules. The kernel is a list here, because a real kernel refuses no rule."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import replace
from ipaddress import ip_address, ip_interface
from types import SimpleNamespace

import pytest

from amphora_agent.bundle import Partner, Vrrp, VrrpInstance
from amphora_agent.errors import FirewallError, InterfaceError, NotElected
from amphora_agent.keepalived.vip_handover import HandoverDeadlines, VipHandover, _expire_new
from amphora_agent.network.pyroute2_lazy import NetlinkError
from amphora_agent.services.health_file import ALIVE

THERE = ip_address("198.51.100.12")
PAIR = VrrpInstance(
    Vrrp("eth1", 1, 254, 1.0, Partner("a", ip_address("198.51.100.11")), (Partner("b", THERE),)),
    (ip_interface("198.51.100.5/32"),),
    1500,
)
REFUSED = NetlinkError(errno.EPERM, "refused")
CLEAN = ["stop_answers", "remove_tunnel", "remove_guard"]


class Kernel:
    """Stand-in for the namespace: records requests, and raises each given error once."""

    def __init__(self, kept):
        self.kept = kept
        self.done = []
        self.known = []
        self.refused = {}

    def run(self, function, *_):
        self.done.append(function.__name__)
        self.known.append(json.loads(self.kept.read_text()) if self.kept.exists() else {})
        for error in self.refused.pop(function.__name__, ()):
            raise error
        return {"list_connections": ["one"], "tunnel_peer": THERE}.get(function.__name__)


@pytest.fixture
def paths(tmp_path):
    return SimpleNamespace(released=tmp_path / "released", handover=tmp_path / "handover.json")


@pytest.fixture
def kernel(paths):
    return Kernel(paths.handover)


def handover(paths, kernel, *, holds=False) -> VipHandover:
    made = VipHandover(paths, kernel, SimpleNamespace(holds_vip=holds), lambda: PAIR)
    made._thread = SimpleNamespace(start=lambda: None)  # the test calls it directly
    return made


def test_the_record_is_written_before_the_kernel_changes(paths, kernel):
    handover(paths, kernel).expect_vips(30)
    assert kernel.done == ["add_guard", "create_tunnel", "add_vips", "start_redirect"]
    assert all(known["expecting"] > time.monotonic() for known in kernel.known)


@pytest.mark.parametrize(
    ("step", "error", "raised"),
    [("add_vips", REFUSED, InterfaceError), ("start_redirect", FirewallError("lead", "refused"), FirewallError)],
)
def test_a_failed_hand_over_is_removed(paths, kernel, step, error, raised):
    made = handover(paths, kernel)
    kernel.refused = {step: [error]}
    with pytest.raises(raised):
        made.expect_vips(30)
    assert kernel.done[-4:] == ["stop_redirect", *CLEAN]
    assert made.describe()["expecting"] is None
    assert json.loads(paths.handover.read_text()) == {"expecting": None, "draining": None}


def test_a_failed_release_is_removed(paths, kernel):
    made = handover(paths, kernel, holds=True)
    kernel.refused = {"add_vips": [REFUSED]}
    with pytest.raises(InterfaceError):
        made.release_vips(30)
    assert kernel.done[-3:] == CLEAN
    assert made.describe()["draining"] is None


def test_the_number_of_partners_is_checked(paths, kernel):
    """Continuing connections need one partner; a release of the VIPs needs at least one."""
    others = (*PAIR.vrrp.peers, Partner("c", ip_address("198.51.100.13")))
    three = replace(PAIR, vrrp=replace(PAIR.vrrp, peers=others))
    role = SimpleNamespace(holds_vip=True)
    for pair, drain, why in ((three, 30, "2 partners"), (replace(three, vrrp=replace(three.vrrp, peers=())), 0, "no")):
        made = VipHandover(paths, kernel, role, lambda pair=pair: pair)
        with pytest.raises(NotElected, match=why):
            made.release_vips(drain)
        assert not paths.released.exists()
    made = VipHandover(paths, kernel, Gone(paths), lambda: three)
    made.release_vips(0)
    assert paths.released.read_text() == ALIVE
    assert kernel.done == ["reset_connections"], "no tunnel is created"


def test_a_kernel_without_the_egress_hook_does_not_fail_the_release(paths, kernel, caplog):
    kernel.refused = {"start_answers": [FirewallError("load rules", "no such hook")]}
    made = VipHandover(paths, kernel, Gone(paths), lambda: PAIR)
    made.release_vips(30)
    assert kernel.done == ["add_guard", "create_tunnel", "add_vips", "start_answers"]
    assert "send answers of open connections through the hand-over tunnel" in caplog.text


def test_a_drain_without_tunnelled_or_direct_answers_is_refused(paths, kernel):
    kernel.refused = {"start_answers": [FirewallError("load rules", "no such hook")]}
    made = VipHandover(paths, kernel, SimpleNamespace(holds_vip=True), lambda: PAIR)
    with pytest.raises(FirewallError):
        made.release_vips(30, direct_answers=False)
    assert not paths.released.exists(), "the VIPs stay"


def test_a_failed_connection_reset_does_not_fail_the_release(paths, kernel, caplog):
    kernel.refused = {"reset_connections": [OSError(errno.EOPNOTSUPP, "1 of 1 connections are still open")]}
    VipHandover(paths, kernel, Gone(paths), lambda: PAIR).release_vips(0)
    assert "stays open until a time-out: [Errno 95] 1 of 1" in caplog.text


@pytest.mark.parametrize("holds", [False, True], ids=["standby", "holder"])
def test_the_end_of_a_drain_resets_connections_to_vips_that_have_left(paths, kernel, holds):
    """An amphora that has the VIPs again continues to serve its connections."""
    paths.handover.write_text(json.dumps({"expecting": None, "draining": 0.0}))
    handover(paths, kernel, holds=holds)._end_expired()
    assert kernel.done == [*(["reset_connections"] if not holds else []), "stop_answers", *CLEAN]


class Gone:
    """The VIPs stay until keepalived releases them."""

    def __init__(self, paths):
        self.paths = paths

    @property
    def holds_vip(self):
        return not self.paths.released.exists()


def test_the_other_direction_keeps_its_tunnel(paths, kernel):
    paths.handover.write_text(json.dumps({"expecting": None, "draining": time.monotonic() + 60}))
    made = handover(paths, kernel)
    kernel.refused = {"start_redirect": [FirewallError("lead", "refused")]}
    with pytest.raises(FirewallError):
        made.expect_vips(30)
    assert "stop_redirect" in kernel.done
    assert "remove_tunnel" not in kernel.done
    assert made.describe()["draining"] > 0


ALONE = replace(PAIR, vrrp=replace(PAIR.vrrp, peers=()))


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        (PAIR, ["tunnel_peer"]),
        (ALONE, ["tunnel_peer", "stop_redirect", *CLEAN]),
        (None, ["tunnel_peer", "stop_redirect", *CLEAN]),
    ],
    ids=["it is a partner", "it is no partner", "no VRRP"],
)
def test_the_redirection_to_a_deleted_amphora_ends(paths, kernel, instance, expected):
    paths.handover.write_text(json.dumps({"expecting": time.monotonic() + 60, "draining": None}))
    VipHandover(paths, kernel, SimpleNamespace(holds_vip=True), lambda: instance)._end_expired()
    assert kernel.done == expected


def test_a_failed_removal_is_retried(paths, kernel):
    paths.handover.write_text(json.dumps({"expecting": 0.0, "draining": None}))
    made = handover(paths, kernel)
    kernel.refused = {"remove_tunnel": [REFUSED]}
    with pytest.raises(NetlinkError):
        made._end_expired()
    made._end_expired()
    assert kernel.done[-3:] == CLEAN
    assert made.describe()["expecting"] is None


def test_an_agent_without_a_record_removes_all_tunnels(paths, kernel):
    handover(paths, kernel).start()
    assert kernel.done == ["stop_redirect", *CLEAN]


def test_an_agent_with_a_record_keeps_the_tunnel(paths, kernel):
    paths.handover.write_text(json.dumps({"expecting": time.monotonic() + 60, "draining": None}))
    handover(paths, kernel).start()
    assert kernel.done == []


@pytest.mark.parametrize(
    ("before", "begun", "left"),
    [
        (HandoverDeadlines(), HandoverDeadlines(9.0, None), HandoverDeadlines(1.0, None)),
        (HandoverDeadlines(5.0, None), HandoverDeadlines(9.0, None), HandoverDeadlines(5.0, None)),
        (HandoverDeadlines(None, 5.0), HandoverDeadlines(9.0, 5.0), HandoverDeadlines(1.0, 5.0)),
    ],
)
def test_only_started_hand_overs_are_ended(before, begun, left):
    assert _expire_new(before, begun, 1.0) == left
