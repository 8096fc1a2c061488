# SPDX-License-Identifier: Apache-2.0
"""A running HAProxy reads every quoted value as exactly one word, and its answer contains that word.

One process reads hundreds of values. The output shows the shortest misread value first.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path

import pytest
from corpus import STRINGS
from haproxy_versions import HAProxy, every_version
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import anything, printable

from amphora_driver.errors import QuotingError
from amphora_driver.render import quoting

EXAMPLES = 400


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("haproxy")
        self.path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


@contextmanager
def serving(haproxy: HAProxy, rules: list[str], folder: Path):
    """Yield a connection to an HAProxy with these rules in an HTTP frontend."""
    sock = folder / "s"
    lines = ["defaults", "    mode http", "    timeout client 9s", "frontend f", f"    bind unix@{sock}", *rules, ""]
    (folder / "cfg").write_text("\n".join(lines))
    with (folder / "said").open("w") as said:
        command = [haproxy.here().program, "-db", "-f", str(folder / "cfg")]
        process = subprocess.Popen(command, stderr=said)
    try:
        deadline = time.monotonic() + 10
        connection = _Connection(sock)
        while True:
            assert time.monotonic() < deadline
            assert process.poll() is None, (folder / "said").read_text()
            with suppress(FileNotFoundError, ConnectionRefusedError):
                connection.connect()
                break
            connection.close()
            time.sleep(0.02)
        yield connection
        connection.close()
    finally:
        process.terminate()
        process.wait(10)


def echoed(haproxy: HAProxy, returns: list[str], folder: Path) -> list[str]:
    """Return HAProxy's answer for each of these ends of a `return` rule."""
    rule = "    http-request return status 200 content-type text/plain"
    rules = []
    for number, end in enumerate(returns):
        keyword, _, word = end.partition(" ")
        condition = f"if {{ path /{number} }}"
        if keyword == "sample":
            rules.append(f"    http-request set-var(txn.value) {word} {condition}")
            end = "lf-string %[var(txn.value)]"  # noqa: PLW2901 - the answer is the variable
        rules.append(f"{rule} {end} {condition}")
    got = []
    with serving(haproxy, rules, folder) as connection:
        for number in range(len(returns)):
            connection.request("GET", f"/{number}")
            got.append(connection.getresponse().read().decode())
    return got


@lru_cache
def generated(way: str) -> tuple[str, ...]:
    """Return the corpus, and the same number of texts from hypothesis."""
    found = dict.fromkeys(STRINGS)
    strategies = WAYS[way][2]

    @settings(max_examples=max(EXAMPLES, settings.default.max_examples))
    @given(st.one_of(*strategies))
    def collect(value):
        found[value] = None

    collect()
    return tuple(found)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _unended(value: str) -> bool:
    return r"\E" not in value


WAYS = {
    "text": (quoting.text, "string", (anything, printable), str),
    "log_format": (quoting.log_format, "lf-string", (anything, printable), str),
    "token": (quoting.token, "string", (anything, st.from_regex(r"[a-z0-9_.:/+-]+", fullmatch=True)), str),
    "ciphers": (quoting.ciphers, "string", (anything, st.from_regex(r"[A-Z0-9+!:@=_.-]+", fullmatch=True)), str),
    "host_name": (
        quoting.host_name,
        "string",
        (anything, st.from_regex(r"[a-z0-9_][a-z0-9_.-]*", fullmatch=True)),
        str,
    ),
    # HAProxy's second parser, for arguments.
    "sample": (
        lambda value, where: quoting.sample("str", value, "", where),
        "sample",
        (anything, printable),
        str,
    ),
    # The pattern is exactly the value; HAProxy removes it from the value followed by an x.
    "substituted": (
        lambda value, where: quoting.substituted(f'str("{_escaped(value)}x")', rf"\Q{value}\E", "", where),
        "sample",
        (anything.filter(_unended), printable.filter(_unended)),
        lambda _: "x",
    ),
    "identifier": (quoting.identifier, "string", (anything, st.uuids().map(str)), str),
    "address": (
        quoting.address,
        "string",
        (anything, st.ip_addresses().map(str)),
        lambda value: str(ip_address(value)) if ":" not in value else f"[{ip_address(value)}]",
    ),
}


@every_version
@pytest.mark.parametrize("way", WAYS)
def test_haproxy_reads_the_quoted_value(way, version, tmp_path):
    quote, keyword, _, meaning = WAYS[way]
    wanted, returns = [], []
    for value in generated(way):
        try:
            quoted = quote(value, "it")
        except QuotingError:
            continue
        returns.append(f"{keyword} {quoted}")
        wanted.append(meaning(value))
    assert len(wanted) > 50
    got = echoed(version, returns, tmp_path)
    wrong = sorted(((w, g) for w, g in zip(wanted, got, strict=True) if w != g), key=lambda pair: len(pair[0]))
    assert wrong == []


def test_a_misread_value_is_detected(tmp_path):
    """Without quotes HAProxy reads another value, so the test is effective."""
    assert echoed(HAProxy("system"), ["lf-string '%[method]'"], tmp_path) == ["GET"]
    assert echoed(HAProxy("system"), ["string x#y"], tmp_path) == ["x"]
