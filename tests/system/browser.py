# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, controlled over two pipes; requests and console errors are recorded."""

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import contextmanager, suppress

TIME_LIMIT = 60.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-features=Translate,OptimizationHints,MediaRouter", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


@contextmanager
def browsing(namespace=None, *, password=None):
    """Open one page in a new browser.

    Args:
        namespace: path of the browser's network namespace; by default, the machine's own.
        password: the password for an authentication request.
    """
    folder = tempfile.mkdtemp(prefix="browser-")
    page = Page(folder, namespace, password)
    try:
        page.open()
        yield page
    finally:
        page.end()
        shutil.rmtree(folder, ignore_errors=True)


class Page:
    """A page: its content, and a user's actions.

    Attributes:
        complaints: console messages: errors, warnings, policy violations.
        requests: the requested addresses.
    """

    def __init__(self, folder, namespace, password):
        self.complaints = []
        self.requests = []
        self._password = password
        self._numbers = itertools.count(1)
        self._answers = {}
        self._loaded = threading.Event()
        self._session = None
        ours, theirs = _pipe(), _pipe()
        argv = ["chromium", *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        if namespace is not None:
            argv = ["nsenter", f"--net={namespace}", "--", *argv]
        # Chromium reads from descriptor 3 and writes to descriptor 4.
        shell = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *argv],
            pass_fds=(ours[0], theirs[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": folder, "XDG_RUNTIME_DIR": folder},
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._write = os.fdopen(ours[1], "wb", buffering=0)
        self._read = os.fdopen(theirs[0], "rb")
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def open(self):
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        if self._password is not None:
            self._ask("Fetch.enable", handleAuthRequests=True)

    def visit(self, address):
        """Load an address completely."""
        self._loaded.clear()
        told = self._ask("Page.navigate", url=address)
        # Without a password the browser shows the body of the authentication request.
        assert told.get("errorText") in {None, "net::ERR_INVALID_AUTH_CREDENTIALS"}, told
        assert self._loaded.wait(TIME_LIMIT), f"the browser did not load {address} in {TIME_LIMIT:.0f} s"

    def says(self, expression):
        """Return the value of a JavaScript expression in the page."""
        told = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def text(self, selector="body"):
        """Return the visible text."""
        return self.says(f"document.querySelector({json.dumps(selector)}).innerText")

    def looks(self, width, height, *, dark=False):
        """Set the size in pixels and the light or dark scheme."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **shape)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=scheme)

    def picture(self):
        """Return a screenshot of the whole page as PNG."""
        return base64.b64decode(self._ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def end(self):
        """Kill the browser and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listening.join(TIME_LIMIT)
        self._write.close()
        self._read.close()

    def _ask(self, method, **parameters):
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        self._send(number, method, parameters)
        told = answer.get(timeout=TIME_LIMIT)
        assert "error" not in told, (method, told["error"])
        return told["result"]

    def _send(self, number, method, parameters):
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")

    def _listen(self):
        waiting = b""
        while chunk := os.read(self._read.fileno(), 1 << 16):
            *messages, waiting = (waiting + chunk).split(b"\0")
            for message in messages:
                self._hear(json.loads(message))

    def _hear(self, message):
        if "id" in message:
            if message["id"] in self._answers:
                self._answers.pop(message["id"]).put(message)
            return
        method, said = message["method"], message["params"]
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method in _COMPLAINTS:
            self.complaints.append(said)
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Fetch.requestPaused":
            self._send(next(self._numbers), "Fetch.continueRequest", {"requestId": said["requestId"]})
        elif method == "Fetch.authRequired":
            answer = {"response": "ProvideCredentials", "username": "operator", "password": self._password}
            told = {"requestId": said["requestId"], "authChallengeResponse": answer}
            self._send(next(self._numbers), "Fetch.continueWithAuth", told)


def _pipe():
    """Return a pipe whose descriptors are above the reserved ones."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for end in ends)
    for end in ends:
        os.close(end)
    return moved
