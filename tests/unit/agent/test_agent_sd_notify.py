# SPDX-License-Identifier: Apache-2.0
"""The agent's sd_notify client: messages and stored descriptors, with a stand-in for systemd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from amphora_agent.errors import ServiceError
from amphora_agent.paths import Paths
from amphora_agent.services import sd_notify
from amphora_agent.services.sd_notify import NOTHING_INHERITED, Inherited
from amphora_agent.services.systemd import MOST_KEPT, Systemd

NAME = "worker 12:34/ü%\n"


class Listener:
    """The stand-in for systemd: receives messages and keeps stored descriptors."""

    def __init__(self, address: str) -> None:
        self.said: list[str] = []
        self.kept: dict[str, int] = {}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            data, descriptors, *_ = socket.recv_fds(self.socket, 4096, 4, socket.MSG_CMSG_CLOEXEC)
            words = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "END" in words:
                return
            if "FDSTORE" in words:
                self.kept[words["FDNAME"]] = descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
            self.said.append(data.decode())

    def close(self, address: str) -> None:
        sd_notify.send(address, "END=1")
        self._thread.join()
        self.socket.close()
        for descriptor in self.kept.values():
            os.close(descriptor)


@pytest.fixture
def address(tmp_path):
    return str(tmp_path / "notify")


@pytest.fixture
def listener(address):
    made = Listener(address)
    yield made
    made.close(address)


def test_the_environment_variables_are_removed():
    environment = {"NOTIFY_SOCKET": "/x", "LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b", "HOME": "/"}
    assert sd_notify.take_inherited(environment, 7) == Inherited("/x")  # they belong to another process
    assert environment == {"HOME": "/"}
    assert sd_notify.take_inherited(environment, 7) == NOTHING_INHERITED


def test_process_without_systemd_sends_no_notification():
    sd_notify.notify_ready(NOTHING_INHERITED)
    assert NOTHING_INHERITED.descriptors == {}


def test_stored_descriptors_are_returned(address, listener, tmp_path):
    """A helper process moves the descriptors to the numbers that systemd uses."""
    services = Systemd(Paths(tmp_path), Inherited(address))
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            services.keep(NAME, theirs.fileno())
            with pytest.raises(ServiceError, match="its name is in use"):
                services.keep(NAME, theirs.fileno())
        (written,) = listener.kept
        assert written.isascii()
        assert not set(written) & set(": \n")
        assert "FDPOLL=0" in listener.said[0]
        # The notification has no answer: the listener's thread can be late.
        until = time.monotonic() + 10
        while len(listener.said) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert listener.said[1] == "BARRIER=1"
        program = (
            "import os\nfrom amphora_agent.services import sd_notify\n"
            # The descriptors from systemd; the first one was not requested.
            f"os.dup2({listener.kept[written]}, 40)\nos.dup2(os.open('/dev/null', os.O_RDONLY), 41)\n"
            "os.dup2(41, 3)\nos.dup2(40, 4)\nos.closerange(5, 4096)\n"
            f"given = dict(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2', LISTEN_FDNAMES='stored:{written}')\n"
            "inheritance = sd_notify.take_inherited(given, os.getpid())\n"
            f"assert inheritance.descriptors == {{{NAME!r}: 4}}, inheritance\n"
            "assert not os.path.exists('/proc/self/fd/3'), 'the other descriptor is closed'\n"
            "assert not os.get_inheritable(4), 'children do not get the descriptor'\n"
            "os.write(4, b'hello')\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, pass_fds=[listener.kept[written]])
        ours.settimeout(10)
        assert ours.recv(16) == b"hello"
        (copy,) = services.kept().values()
        os.close(copy)
        services.drop(NAME)
        services.drop(NAME)
        assert services.kept() == {}
    sd_notify.store_descriptor(
        address, "the last one", listener.socket.fileno()
    )  # so that all earlier messages are received
    assert f"FDSTOREREMOVE=1\nFDNAME={written}" in listener.said


def test_the_store_is_limited_like_that_of_systemd(address, listener, tmp_path):
    services = Systemd(Paths(tmp_path), Inherited(address))
    for number in range(MOST_KEPT):
        services.keep(str(number), listener.socket.fileno())
    with pytest.raises(ServiceError, match="or 64 descriptors are stored"):
        services.keep("one more", listener.socket.fileno())
    for number in range(MOST_KEPT):
        services.drop(str(number))


def test_a_missing_listener_is_no_error(address, tmp_path):
    services = Systemd(Paths(tmp_path), Inherited(address))
    with pytest.raises(ServiceError, match="does not accept the message"):
        services.keep("x", 0)
    with pytest.raises(ServiceError, match="did not start this agent"):
        Systemd(Paths(tmp_path), NOTHING_INHERITED).keep("x", 0)
    with pytest.raises(ServiceError, match="too long"):
        sd_notify.store_descriptor(address, "x" * 300, 0)
