# SPDX-License-Identifier: Apache-2.0
"""The keepalived that has IPVS forward: when it is started, told to read again, and ended."""

from __future__ import annotations

import signal
from dataclasses import replace
from ipaddress import ip_address
from types import SimpleNamespace
from uuid import UUID

import pytest

from amphora_agent.bundle import Bundle
from amphora_agent.errors import KeepalivedError
from amphora_agent.keepalived import ipvs_process
from amphora_agent.keepalived.ipvs_process import SERVICE, LvsKeepalived
from amphora_agent.l4.model import Member, VirtualServer
from amphora_agent.paths import Paths


def server(*numbers: int, weight: int = 1) -> VirtualServer:
    members = (Member(str(UUID(int=n)), ip_address(f"10.0.0.{n}"), 53, weight, False, True) for n in numbers)
    return VirtualServer(
        str(UUID(int=99)),
        "UDP",
        53,
        (ip_address("198.51.100.5"),),
        None,
        None,
        "ROUND_ROBIN",
        None,
        "hidden",
        None,
        tuple(members),
    )


def bundle(*servers: VirtualServer) -> Bundle:
    return Bundle(UUID(int=1), UUID(int=2), 1, None, (), {}, None, (), virtual_servers=servers)


class Daemons:
    """Remembers what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.runs = False

    def start(self, name, argv, *, inner, care):
        assert (name, inner) == (SERVICE, True)
        # Its own files, no VRRP, and IPVS goes on when it ends.
        assert {"-C", "-I", "-R"} <= set(argv)
        assert {str(file) for file in care.leftovers} <= set(argv)
        if not self.runs:
            self.asked.append("start")
        self.runs = True

    def stop(self, name, *, missed=False):
        self.asked.append("stop")
        self.runs = False

    def signal(self, name, number):
        assert number == signal.SIGHUP
        self.asked.append("read again")

    def status(self, name):
        return SimpleNamespace(pid=7, wanted=True) if self.runs else None


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """One whose keepalived and kernel say yes to everything; `said` is what they were asked, in order."""
    paths, daemons = Paths(tmp_path), Daemons()
    paths.run.mkdir(parents=True)
    monkeypatch.setattr(ipvs_process, "verify", lambda _: daemons.asked.append("check"))
    monkeypatch.setattr(ipvs_process.ipvs, "flush", lambda: daemons.asked.append("flush"))
    inner = SimpleNamespace(run=lambda function, *arguments: function(*arguments))
    made = LvsKeepalived(paths, daemons, inner)

    def said() -> list[str]:
        found, daemons.asked = daemons.asked, []
        return found

    return SimpleNamespace(keepalived=made, said=said, paths=paths, daemons=daemons)


def test_it_is_told_of_what_changed_only(lab):
    lab.keepalived.check(bundle(server(1)))
    lab.keepalived.bring_about(bundle(server(1)))
    assert lab.said() == ["check", "start"]
    lab.keepalived.bring_about(bundle(server(1)))
    # Weights are in files that it watches.
    lab.keepalived.bring_about(bundle(server(1, weight=9)))
    assert lab.said() == []
    lab.keepalived.bring_about(bundle(server(1, 2)))
    assert lab.said() == ["check", "read again"]
    assert lab.keepalived.difference(bundle(server(1, 2))) == ""
    assert "not as it was written" in lab.keepalived.difference(bundle(server(1)))


def test_it_ends_with_the_last_member_and_ipvs_with_it(lab):
    lab.keepalived.bring_about(bundle(server(1)))
    lab.said()
    lab.keepalived.bring_about(bundle(replace(server(), members=())))
    assert lab.said() == ["stop", "flush"]
    assert not lab.paths.lvs_configuration.exists()
    lab.keepalived.bring_about(bundle())
    assert lab.said() == []
    assert lab.keepalived.difference(bundle()) == ""
    assert "does not run" in lab.keepalived.difference(bundle(server(1)))


def test_who_has_begun_need_not_say_it_again(lab):
    lab.keepalived.bring_about(bundle(server(1)))
    lab.keepalived.renew()
    assert lab.said() == ["check", "start"]
    lab.keepalived.renew()
    assert lab.said() == ["stop", "start"]


def test_what_it_refuses_changes_nothing(lab, monkeypatch):
    lab.keepalived.bring_about(bundle(server(1)))
    before = lab.paths.lvs_configuration.read_text()
    lab.said()

    def refuse(_: object) -> None:
        raise KeepalivedError("check keepalived's configuration", "no")

    monkeypatch.setattr(ipvs_process, "verify", refuse)
    with pytest.raises(KeepalivedError):
        lab.keepalived.bring_about(bundle(server(1, 2)))
    assert (lab.said(), lab.paths.lvs_configuration.read_text()) == ([], before)
    assert not lab.paths.lvs_candidate.exists()
