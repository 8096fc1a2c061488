# SPDX-License-Identifier: Apache-2.0
"""The log forwarder: its imports and version, a change of its targets, and the agent's side of its counters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import amphora_agent
from amphora_agent.log_forwarder import ELSEWHERE
from amphora_agent.log_forwarder.daemon import LogForwarding
from amphora_agent.log_forwarder.forwarder import Forwarder
from amphora_agent.log_forwarder.target import Target
from amphora_agent.log_forwarder.transports import Datagrams
from amphora_agent.log_settings import LogSettings, LogTarget, parse_endpoint
from amphora_agent.paths import Paths
from amphora_agent.services.supervisor import LINE_BYTES, Supervisor

PACKAGE = Path(amphora_agent.__file__).parent
LIST = """import sys
sys.path.insert(0, {place!r})
import amphora_agent.log_forwarder.__main__
print("\\n".join(name + " " + (getattr(module, "__file__", None) or "") for name, module in sys.modules.items()))
"""


def test_the_process_imports_the_standard_library_only_and_its_version_covers_the_sources():
    command = [sys.executable, "-I", "-S", "-c", LIST.format(place=str(PACKAGE.parent))]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    modules = dict(line.split(" ", 1) for line in said.splitlines())
    assert {"ssl", "http.client", "logging"}.isdisjoint(modules)
    library = Path(sys.modules["os"].__file__).parent
    foreign = {name for name, file in modules.items() if file and not file.startswith((str(library), str(PACKAGE)))}
    assert foreign == set()
    own = {Path(file).relative_to(PACKAGE) for file in modules.values() if file.startswith(str(PACKAGE))}
    elsewhere = {str(file) for file in own if file.parts[0] != "log_forwarder"}
    assert elsewhere == {*ELSEWHERE, "source_checksum.py"}


# -- a change of targets -----------------------------------------------------------------------------------------------


@pytest.fixture
def forwarder(tmp_path):
    made = Forwarder(f"{tmp_path}/admin.sock", f"{tmp_path}/control.sock", "1")
    yield made
    made.close()


@pytest.fixture
def receiver():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind(("127.0.0.1", 0))
        opened.settimeout(5)
        yield opened


def url_of(receiver):
    return f"udp://127.0.0.1:{receiver.getsockname()[1]}"


def configure(forwarder, settings):
    body = {"op": "configure", "logs": settings.to_document(), "hostname": "h", "amphora_id": "a", "digest": "d"}
    return forwarder._handle(body, [])


def status_of(forwarder, tmp_path):
    """The agent's side, with the status of this log forwarder."""
    made = LogForwarding(Paths(tmp_path), SimpleNamespace(), SimpleNamespace(), "a")
    made._status = forwarder._handle({"op": "status"}, [])
    return made.line_counts()


def test_a_refused_change_keeps_the_former_targets(forwarder, receiver, monkeypatch):
    made = []

    class Recorded(Target):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("amphora_agent.log_forwarder.forwarder.Target", Recorded)
    used = LogTarget(url_of(receiver))
    configure(forwarder, LogSettings((used,)))
    (before,) = made
    unusable = LogSettings((used, LogTarget("tls://192.0.2.9:6514")), (), "no certificate")
    with pytest.raises((ValueError, OSError)):
        configure(forwarder, unusable)
    assert forwarder._admin == {used: before}
    before.queue.put([b"still sent"])
    assert receiver.recv(100) == b"still sent"
    assert [one._stopping.is_set() for one in made] == [False, True], "the new target is closed"


def test_sums_of_lines_do_not_decrease_when_targets_change(forwarder, receiver, tmp_path):
    used = LogTarget(url_of(receiver))
    configure(forwarder, LogSettings((used,)))
    target = forwarder._admin[used]
    target.queue.put([b"one", b"two"])
    assert [receiver.recv(100), receiver.recv(100)] == [b"one", b"two"]
    target.queue.drop(5)
    target.close()
    target._thread.join()
    assert status_of(forwarder, tmp_path) == {"sent": 2, "lost": 5}
    configure(forwarder, LogSettings((), (used,)))
    assert status_of(forwarder, tmp_path) == {"sent": 2, "lost": 5}
    shown = forwarder._handle({"op": "status"}, [])
    assert shown["admin"] == []
    assert [one["sent"] for one in shown["tenant"]] == [0]


def test_lines_that_a_removed_target_was_sending_are_uncertain(forwarder, tmp_path):
    used, begun, ended = LogTarget("udp://127.0.0.1:9"), threading.Event(), threading.Event()

    def send(_):
        begun.set()
        ended.wait(10)
        raise OSError("the target was removed")

    configure(forwarder, LogSettings((used,)))
    target = forwarder._admin[used]
    target._transport = SimpleNamespace(send=send, close=lambda: None, uncertain=0, lost=0, is_connected=True)
    target.queue.put([b"x"] * 3)
    assert begun.wait(10)
    target.queue.put([b"y"] * 2)
    configure(forwarder, LogSettings((LogTarget("udp://127.0.0.1:10"),)))
    ended.set()
    assert status_of(forwarder, tmp_path) == {"sent": 0, "lost": 5}


def read_messages(connection, number):
    """Return messages with octet counting."""
    found, buffer = [], b""
    while len(found) < number:
        buffer += connection.recv(1 << 16)
        while (space := buffer.find(b" ")) > 0 and len(buffer) > space + int(buffer[:space]):
            end = space + 1 + int(buffer[:space])
            found.append(buffer[space + 1 : end])
            buffer = buffer[end:]
    return found


def test_waiting_lines_survive_a_change_of_their_target(forwarder, tmp_path):
    with socket.socket() as server:
        # A bound socket that does not listen refuses connections, and no other process gets its port.
        server.bind(("127.0.0.1", 0))
        server.settimeout(30)
        used = LogTarget(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        configure(forwarder, LogSettings((used,), queue_bytes=1 << 20))
        before = forwarder._admin[used]
        before.queue.put([b"on the way"])
        while not before._error:
            before._stopping.wait(0.01)
        waiting = [b"%03d" % number for number in range(200)]
        before.queue.put(waiting)
        configure(forwarder, LogSettings((used,), queue_bytes=1 << 19))
        before._thread.join(30)
        assert not before._thread.is_alive()
        # Only now can a connection succeed, so it is one of the new target.
        server.listen()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30)
            assert read_messages(connection, len(waiting)) == waiting
    assert status_of(forwarder, tmp_path)["lost"] == 1, "the line on the way"


def test_a_smaller_queue_keeps_the_oldest_lines_and_counts_the_others(forwarder, tmp_path):
    used = LogTarget("tcp://127.0.0.1:9")
    configure(forwarder, LogSettings((used,), queue_bytes=1 << 20))
    before = forwarder._admin[used]
    before.queue.put([b"on the way"])
    while not before._error:
        before._stopping.wait(0.01)
    before.queue.put([b"x" * 1000] * 200)
    configure(forwarder, LogSettings((used,), queue_bytes=1 << 16))
    after = forwarder._admin[used]
    assert 0 < after.queue.dropped < 200
    assert status_of(forwarder, tmp_path) == {"sent": 0, "lost": 1 + after.queue.dropped}


def test_a_socket_for_datagrams_is_opened_again_after_an_error():
    made = Datagrams(parse_endpoint("udp://127.0.0.1:9"))
    made.send([b"x"])
    assert made.is_connected
    with pytest.raises(OSError, match="too long"):
        made.send([b"x" * 70_000])
    assert not made.is_connected


@pytest.fixture
def short_path():
    """A folder whose path leaves room for the names of sockets, which have at most 108 characters."""
    with tempfile.TemporaryDirectory(prefix="adl-") as made:
        yield Path(made)


def test_a_restarted_agent_knows_the_sums_before_its_first_answer(short_path):
    """A controller that reads no lines after a restart of the agent would count all former lines again."""
    paths = Paths(short_path)
    paths.log_forwarder.mkdir(parents=True)
    served = Forwarder(f"{paths.log_forwarder}/admin.sock", f"{paths.log_forwarder}/control.sock", "1")
    served._former["sent"] = 7
    serving = threading.Thread(target=served.run_once, args=(10,))
    serving.start()
    made = LogForwarding(paths, SimpleNamespace(), SimpleNamespace(), "a")
    made._run, made._version = lambda: None, "1"
    made.start(LogSettings((LogTarget("udp://127.0.0.1:9"),)))
    serving.join()
    served.close()
    assert made.line_counts() == {"sent": 7, "lost": 0}


# -- the output of daemons ---------------------------------------------------------------------------------------------


def drained(*reads):
    """Return the lines that the supervisor keeps of these writes of a daemon."""
    service, forwarded, closed = SimpleNamespace(name="haproxy", log=[]), [], []
    supervisor = SimpleNamespace(
        _forward=lambda _, lines: forwarded.extend(lines), _selector=SimpleNamespace(unregister=closed.append)
    )
    incomplete, (reader, writer) = bytearray(), os.pipe()
    for data in reads:
        os.write(writer, data)
        Supervisor._drain(supervisor, service, reader, incomplete)
    os.close(writer)
    Supervisor._drain(supervisor, service, reader, incomplete)
    assert closed == [reader]
    assert service.log == forwarded
    return forwarded


FORGED = "[ALERT] (1) : forged"


@pytest.mark.parametrize(
    ("reads", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\ntw", b"o"], ["one", "two"]),
        ([b"listener agent=", f"{FORGED}\n".encode()], [f"listener agent={FORGED}"]),
        (
            [f"x=\u2028{FORGED}\x0b\x85\r{FORGED}\n".encode()],
            [f"x=\u2028{FORGED}\x0b\x85\r{FORGED}"],
        ),
        ([b"x" * LINE_BYTES, FORGED.encode(), b"\nnext\n"], ["x" * LINE_BYTES, "next"]),
    ],
)
def test_only_a_line_feed_ends_a_line_of_a_daemon(reads, lines):
    assert drained(*reads) == lines
