# SPDX-License-Identifier: Apache-2.0
"""Drift audit: the verdict on the bundle state that an agent reports."""

import pytest

from amphora_driver.agent.client import BundleState
from amphora_driver.cli import drift
from amphora_driver.maintenance.drift_audit import Drift, classify_drift

WANTED = {
    "generation": 4,
    "haproxy": "backend x\n    dynamic-cookie-key hush\n    server a 192.0.2.1:80\n",
    "files": [{"name": "tls/a.pem", "content": "PRIVATE"}],
    "interfaces": [
        {
            "mac": "FA:16:3e:00:00:01",
            "name": "eth1",
            "mtu": 1500,
            "addresses": ["2001:DB8::1/64"],
            "vips": ["192.0.2.9/32"],
        }
    ],
    "limits": {"connections": None},
    "allowed": [],
    "pings": {},
    "vrrp": None,
}


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (BundleState(generation=4, digest="d"), Drift.NONE),
        (BundleState(generation=4, digest="e"), Drift.RENDERER),
        (BundleState(generation=3, digest="d"), Drift.BEHIND),
        (BundleState(generation=0), Drift.BEHIND),
        (BundleState(), Drift.BEHIND),
        (BundleState(generation=5, digest="d"), Drift.AHEAD),
        (BundleState(generation=4 + 2**31, digest="d"), Drift.AHEAD),
        (BundleState(generation=5 + 2**31, digest="d"), Drift.IMPLAUSIBLE),
        (BundleState(generation=2**62), Drift.IMPLAUSIBLE),
    ],
)
def test_the_verdict_on_each_reported_state(said, verdict):
    assert classify_drift(4, "d", said) is verdict


def said(**changes):
    digest = "6c2f9c5d"
    bundle = {name: WANTED[name] for name in ("limits", "allowed", "pings", "vrrp", "interfaces")}
    files = drift._as_stored(WANTED)["files"]
    assert digest not in str(files)
    text = WANTED["haproxy"].replace("hush", "***")
    link = {"mac": "fa:16:3e:00:00:01", "name": "eth1", "mtu": 1500, "up": True}
    there = {**link, "addresses": ["2001:db8::1/64", "192.0.2.9/32"]}
    return {"generation": 4, "haproxy": text, "bundle": {**bundle, "files": files}, "interfaces": [there], **changes}


def test_equal_bundles_have_no_difference():
    assert drift.list_differences("am", WANTED, said()) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"generation": 3}, "generation: wanted 4, amphora am has 3"),
        ({"haproxy": None}, "-    server a 192.0.2.1:80"),
        ({"interfaces": []}, "interface eth1 (FA:16:3e:00:00:01) is gone"),
        (
            {"drift": {"unrepaired": ["files"], "last": {"sentences": ["a.pem is damaged"]}}},
            "the agent cannot repair: a.pem is damaged",
        ),
        ({"bundle": {**said()["bundle"], "allowed": [{"port": 80, "networks": []}]}}, '+   "port": 80.0'),
        ({"bundle": {**said()["bundle"], "files": []}}, '-   "name": "tls/a.pem",'),
        ({"bundle": {**said()["bundle"], "virtual_servers": [{"port": 53}]}}, '+   "port": 53.0'),
    ],
)
def test_the_kind_of_each_difference(changes, line):
    lines = drift.list_differences("am", WANTED, said(**changes))
    assert line in lines
    assert "hush" not in str(lines)
    assert "PRIVATE" not in str(lines)


def test_a_different_interface_is_drift():
    (there,) = said()["interfaces"]
    lines = drift.list_differences(
        "am", WANTED, said(interfaces=[{**there, "up": False, "mtu": 1400, "name": "x", "addresses": []}])
    )
    assert lines == [
        "interface eth1 is down",
        "interface eth1 has the name x",
        "interface eth1 has an MTU of 1400, not 1500",
        "interface eth1 lacks 2001:DB8::1/64",
        "interface eth1 lacks 192.0.2.9/32",
    ]


def test_an_old_agent_without_drift_report_has_no_drift():
    file = "global\n# From here on: the load balancer's part.\n" + said()["haproxy"]
    found = drift.from_diagnostics({"generation": 4, "haproxy.cfg": file, "interfaces": said()["interfaces"]})
    assert drift.list_differences("am", WANTED, found) == []
