# SPDX-License-Identifier: Apache-2.0
"""Fixtures: one network per run, one amphora per test, and one lab for all tests of the model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import pki
import pytest
from agent_heartbeats import decode
from amphora_lab import CONTROLLER, HEARTBEATS, Amphora, Network, eventually
from every_haproxy import lab_with
from haproxy_versions import VERSIONS
from pair_lab import FAST, PLACES, Pair, PairNetwork, plain
from served import Served
from stalls import Stalls, event_report
from throwaway_authority import Authority
from wire import Wire


@pytest.fixture(scope="session", autouse=True)
def _clean_up_at_sigterm():
    """Make SIGTERM, for example at a job's time limit, end the run with the fixtures' cleanup."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


class Host:
    """The host's files in the directories of an amphora's files."""

    def __init__(self) -> None:
        self.at_first = self()

    def __call__(self) -> dict[str, list[str] | None]:
        places = (Path("/etc/amphora-agent"), Path("/var/lib/amphora-agent"), Path("/run/amphora-agent"))
        return {str(p): sorted(f.name for f in p.iterdir()) if p.exists() else None for p in places}


@pytest.fixture(scope="session", autouse=True)
def host_before():
    """Record the host's files before the start of the first amphora."""
    return Host()


@pytest.fixture(scope="session")
def network():
    made = Network(f"dp{os.getpid()}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def authority():
    return Authority("controllers")


@pytest.fixture
def amphora(network, authority, tmp_path):
    network.plug()
    made = Amphora(network, tmp_path, authority)
    try:
        made.start()
        eventually(made.answers, "the agent answers")
        yield made
    finally:
        made.power_off()
        network.unplug()


class HeartbeatReceiver:
    """The controller's socket for heartbeats."""

    def __init__(self, amphora: Amphora) -> None:
        self._key = amphora.key
        self._socket = amphora.network.thread("ctl").run(self._open)

    @staticmethod
    def _open():
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((CONTROLLER, HEARTBEATS))
        opened.settimeout(10)
        return opened

    def next(self):
        return decode(self._socket.recv(65536), self._key)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def receiver(amphora):
    made = HeartbeatReceiver(amphora)
    yield made
    made.close()


@pytest.fixture
def receiver_of():
    """Return a function that opens the controller's socket for an amphora's heartbeats."""
    with contextlib.ExitStack() as closing:
        yield lambda amphora: closing.enter_context(contextlib.closing(HeartbeatReceiver(amphora)))


@pytest.fixture(scope="session")
def lab(request, authority, tmp_path_factory):
    """The lab of the tests of the model (`served.py`), with the system's HAProxy by default."""
    made = lab_with(getattr(request, "param", VERSIONS[0]), authority, tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


@pytest.fixture
def served(lab):
    made = Served(lab)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tenant():
    """A tenant's certificate authority."""
    return pki.Authority("tenant")


@pytest.fixture
def wire():
    """Namespaces with a load balancer's network only (`wire.py`)."""
    made = Wire()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair_network():
    made = PairNetwork(f"pr{os.getpid()}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def booted(pair_network, authority, tmp_path_factory):
    made = Pair(pair_network, tmp_path_factory.mktemp("pair"), authority)
    made.stalls = Stalls()
    try:
        for place in PLACES[:2]:
            made.boot(place)
        made.web()
        yield made
    finally:
        made.close()
        made.stalls.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failed test of a pair prints the VIP holders over time."""
    report = yield
    pair = getattr(item, "funcargs", {}).get("booted")
    if report.failed and pair is not None:
        report.sections.append(("VRRP", event_report(pair.nodes, pair.stalls.found)))
    return report


@pytest.fixture
def pair(booted):
    """Two serving nodes, one of which has the VIPs."""
    booted.mend()
    booted.advert = FAST
    booted.speak_ipv4()
    booted.push(plain(booted))
    booted.calm()
    return booted
