# SPDX-License-Identifier: Apache-2.0
"""The reachability probe: answers, missing answers, and faults of the prober."""

import errno
import os
import socket
import ssl
import threading
import time

import pytest
import urllib3

from amphora_driver.errors import (
    AgentRefused,
    AgentUnreachable,
    AgentUntrusted,
    CertificateError,
    ConfigurationError,
    DeadlinePassed,
    StoreError,
)
from amphora_driver.failover import reachability_probe as asking
from amphora_driver.failover.failure_rules import ProbeOutcome
from amphora_driver.failover.reachability_probe import ReachabilityProbe, local_fault


class Agents:
    """Performs the given action; `forgotten` has the agents whose connections were closed first."""

    def __init__(self, does=None, prepares=lambda: None):
        self.does = does
        self.prepares = prepares
        self.forgotten = []
        self.asked = 0
        self.lock = threading.Lock()

    def forget(self, amphora_id):
        self.forgotten.append(amphora_id)

    def prepare(self):
        self.prepares()
        return self

    def info(self, _amphora_id, _address, *, prepared, deadline):
        assert prepared is self, "the probe time starts after the local preparation"
        with self.lock:
            self.asked += 1
        assert 1.0 < deadline.left() <= 2.0
        if callable(self.does):
            self.does()
        elif self.does is not None:
            raise self.does


@pytest.fixture
def asked():
    """Probe an agent that performs an action; `others` are witnesses that should listen. Return the result."""
    made = []

    def ask(does, others=()):
        witnesses = ReachabilityProbe(Agents(does), 2.0, others)
        made.append(witnesses)
        assert witnesses.start("a", "203.0.113.9")
        return answered(witnesses, "a")

    yield ask
    for one in made:
        one.close()


def answered(witnesses, name):
    deadline = time.monotonic() + 20
    while (said := witnesses.result(name)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return said


def unreachable(number):
    error = AgentUnreachable("ask", os.strerror(number))
    error.__cause__ = RuntimeError("urllib3's")
    error.__cause__.__cause__ = OSError(number, os.strerror(number))
    return error


def broken_off(reason, kind=ssl.SSLError):
    """The error of `AgentClient`: OpenSSL's error within urllib3's. Its errno is 1, the same as EPERM."""
    cause = kind(1, f"[SSL: {reason}] (_ssl.c:2580)")
    cause.reason = reason
    error = AgentUnreachable("ask", f"broke off the TLS handshake ({reason})")
    error.__cause__ = urllib3.exceptions.SSLError(cause)
    error.__cause__.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("does", "how"),
    [
        (None, ProbeOutcome.ANSWERED),
        (AgentRefused("ask", "it answered 503", status=503), ProbeOutcome.ANSWERED),
        (AgentUnreachable("ask", "did not answer in time"), ProbeOutcome.NO_ANSWER),
        (AgentUntrusted("ask", "its certificate has expired"), ProbeOutcome.ANSWERED),
        (broken_off("TLSV13_ALERT_CERTIFICATE_REQUIRED"), ProbeOutcome.ANSWERED),
        (broken_off("TLSV1_ALERT_UNKNOWN_CA"), ProbeOutcome.ANSWERED),
        (broken_off("SSLV3_ALERT_CERTIFICATE_EXPIRED"), ProbeOutcome.ANSWERED),
        (broken_off("UNEXPECTED_EOF_WHILE_READING", ssl.SSLEOFError), ProbeOutcome.NO_ANSWER),
        (broken_off("WRONG_VERSION_NUMBER"), ProbeOutcome.NO_ANSWER),
        (DeadlinePassed("ask", "over"), ProbeOutcome.INCONCLUSIVE),
        (StoreError("read the authorities", "away"), ProbeOutcome.INCONCLUSIVE),
        (unreachable(errno.ECONNREFUSED), ProbeOutcome.NO_ANSWER),
        (unreachable(errno.EHOSTUNREACH), ProbeOutcome.NO_ANSWER),
        (unreachable(errno.ENETUNREACH), ProbeOutcome.INCONCLUSIVE),
        (unreachable(errno.ENETDOWN), ProbeOutcome.INCONCLUSIVE),
        (unreachable(errno.EMFILE), ProbeOutcome.INCONCLUSIVE),
        (unreachable(errno.EPERM), ProbeOutcome.INCONCLUSIVE),
        (CertificateError("read ours", "it is not there"), ProbeOutcome.INCONCLUSIVE),
        (RuntimeError("unexpected"), ProbeOutcome.INCONCLUSIVE),
    ],
)
def test_the_results_of_a_probe(asked, does, how):
    assert asked(does).outcome is how


@pytest.mark.parametrize("error", [StoreError("read the authorities", "away"), CertificateError("read ours", "gone")])
def test_a_missing_local_file_is_no_amphora_failure(error):
    def prepares():
        raise error

    agents = Agents(prepares=prepares)
    witnesses = ReachabilityProbe(agents, 2.0)
    try:
        assert witnesses.start("a", "x")
        assert answered(witnesses, "a").outcome is ProbeOutcome.INCONCLUSIVE
        assert agents.asked == 0
    finally:
        witnesses.close()


def test_a_slow_controller_does_not_shorten_the_probe(monkeypatch):
    ahead = [0.0]
    real = time.monotonic
    monkeypatch.setattr(asking.time, "monotonic", lambda: real() + ahead[0])

    def slow(seconds):
        def prepares():
            ahead[0] += seconds

        return prepares

    for seconds, how in ((1.5, ProbeOutcome.ANSWERED), (2.5, ProbeOutcome.INCONCLUSIVE)):
        # `Agents.info` asserts that the probe has its full time.
        witnesses = ReachabilityProbe(Agents(prepares=slow(seconds)), 2.0)
        try:
            assert witnesses.start("a", "x")
            assert answered(witnesses, "a").outcome is how
        finally:
            witnesses.close()


def test_the_detail_states_the_cause(asked):
    assert asked(unreachable(errno.ENETUNREACH)).detail == "network is unreachable"
    assert asked(AgentUnreachable("ask", "did not answer in time")).detail == "did not answer in time"
    assert local_fault(AgentUnreachable("ask", "timed out")) == ""


def test_a_blind_period_is_recorded():
    agents = Agents(unreachable(errno.ENETDOWN))
    witnesses = ReachabilityProbe(agents, 2.0)
    try:
        witnesses.start("a", "x")
        first = answered(witnesses, "a")
        agents.does = AgentUnreachable("ask", "timed out")
        deadline = time.monotonic() + 20
        while (said := witnesses.result("a")).outcome is ProbeOutcome.INCONCLUSIVE:
            assert time.monotonic() < deadline
            witnesses.start("a", "x")
            time.sleep(0.005)
        assert said.inconclusive_at is not None
        assert said.inconclusive_at >= first.at
        assert agents.forgotten[0] == "a", "a probe reuses no existing connection"
    finally:
        witnesses.close()


def listening():
    made = socket.create_server(("127.0.0.1", 0))
    return made, f"127.0.0.1:{made.getsockname()[1]}"


def test_other_machines_that_listen_say_that_the_network_is_there(asked):
    server, place = listening()
    with server:
        assert asked(AgentUnreachable("ask", "timed out"), [place]).outcome is ProbeOutcome.NO_ANSWER
        # One is enough.
        assert asked(AgentUnreachable("ask", "timed out"), ["[::1]:1", place]).outcome is ProbeOutcome.NO_ANSWER
    assert asked(AgentUnreachable("ask", "timed out"), [place]).outcome is ProbeOutcome.NO_ANSWER, (
        "a refusal is an answer"
    )


def test_unreachable_witnesses_stop_detection(asked):
    said = asked(AgentUnreachable("ask", "timed out"), ["host.invalid:22"])
    assert said.outcome is ProbeOutcome.INCONCLUSIVE
    assert "witnesses" in said.detail
    assert asked(None, ["host.invalid:22"]).outcome is ProbeOutcome.ANSWERED


@pytest.mark.parametrize("text", ["host", ":22", "host:ssh", ""])
def test_a_witness_is_written_as_host_and_port(text):
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        ReachabilityProbe(Agents(), 2.0, [text])


def test_probes_are_limited_and_unique():
    released = threading.Event()
    witnesses = ReachabilityProbe(Agents(released.wait), 2.0)
    try:
        assert [witnesses.start(f"a{number}", "x") for number in range(20)] == [True] * 16 + [False] * 4
        assert not witnesses.start("a0", "x")
        released.set()
        answered(witnesses, "a15")
        witnesses.retain({"a15"})
        assert witnesses.result("a0") is None
    finally:
        released.set()
        witnesses.close()
