# SPDX-License-Identifier: Apache-2.0
"""The process of the agent: gunicorn's worker with a timer of the kernel, and without a master."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from amphora_agent import server

# An application in place of the agent's own one, which needs a network namespace.
PROGRAM = """
import ctypes, signal, sys, time
from gunicorn.config import Config
from amphora_agent import server

workers = []

def answer(environ, respond):
    path = environ["PATH_INFO"]
    if path.startswith("/wait/"):
        time.sleep(float(path.removeprefix("/wait/")))
    elif path == "/hang":
        ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock, so that no thread runs Python code
    elif path == "/break":
        workers[0].poller.close()
        time.sleep(60)
    respond("200 OK", [("Connection", "close"), ("Content-Length", "2")])
    return [b"ok"]

class Application:
    def wsgi(self):
        exec(sys.argv[1])
        return answer

options = Config()
for name, value in dict(bind="127.0.0.1:0", threads=server.THREADS, graceful_timeout=1, loglevel="warning").items():
    options.set(name, value)

def ready(worker):
    workers.append(worker)
    print(worker.sockets[0].getsockname()[1], flush=True)

options.set("post_worker_init", ready)
exec(sys.argv[2])
server.serve(Application(), options)
"""


class Running:
    """A process that serves the application on a loopback port."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self._port = port

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def send(self, path: str) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port), 30)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return connection

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and the log."""
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log


@contextmanager
def serving(settings="", load="pass"):
    """Run the program with these statements before the start, and in the load of the application."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, load, settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process, int(process.stdout.readline() or 0))
    finally:
        process.kill()
        with suppress(ValueError):
            process.communicate()


def test_the_kernel_ends_an_agent_that_hangs():
    with serving("server.HANG_SECONDS = 2.0") as agent:
        assert agent.get("/") == b"ok"
        with agent.send("/hang"):
            status, log = agent.end()
    assert status == -signal.SIGALRM
    assert "in answer" in log, "the log shows where the agent hung"


def test_an_agent_that_hangs_ends_also_if_its_parent_had_blocked_and_ignored_the_signal():
    inherited = (
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])",
    )
    with serving("\n".join(["server.HANG_SECONDS = 2.0", *inherited])) as agent, agent.send("/hang"):
        assert agent.end()[0] == -signal.SIGALRM


def test_the_kernel_ends_an_agent_that_does_not_start():
    with serving("server.START_SECONDS = 0.3", load="time.sleep(60)") as agent:
        status, log = agent.end()
    assert status == -signal.SIGALRM
    assert "in wsgi" in log


def test_an_agent_whose_threads_are_all_busy_does_not_count_as_hanging():
    """The limit is longer than a pass of the main loop, and shorter than the requests."""
    with serving("server.HANG_SECONDS = 2.5") as agent, ThreadPoolExecutor(server.THREADS) as threads:
        assert list(threads.map(agent.get, ["/wait/3.5"] * server.THREADS)) == [b"ok"] * server.THREADS
        assert agent.get("/") == b"ok"
        agent.process.terminate()
        assert agent.end()[0] == 0


def test_open_requests_finish_after_a_stop_within_the_time_limit():
    with serving() as agent, agent.send("/wait/0.7") as short, agent.send("/wait/60"):
        # The answer of a later request shows that the threads have the two earlier ones.
        assert agent.get("/") == b"ok"
        agent.process.terminate()
        assert short.makefile("rb").read().endswith(b"ok")
        assert agent.end()[0] == 0


def test_an_error_of_the_main_loop_ends_the_agent_in_spite_of_an_open_request():
    with serving() as agent, agent.send("/break"):
        begin = time.monotonic()
        status, log = agent.end()
        assert status != 0
        assert time.monotonic() - begin < server.HANG_SECONDS / 2
    assert "Traceback" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_an_immediate_stop_does_not_wait_for_open_requests(number):
    with serving() as agent, agent.send("/wait/60"):
        assert agent.get("/") == b"ok"
        begin = time.monotonic()
        agent.process.send_signal(number)
        agent.end()
        assert time.monotonic() - begin < server.HANG_SECONDS / 2


def test_an_agent_that_cannot_load_its_application_exits_with_an_error():
    with serving(load="raise OSError('no key')") as agent:
        status, log = agent.end()
    assert (status, "OSError: no key" in log) == (1, True)
