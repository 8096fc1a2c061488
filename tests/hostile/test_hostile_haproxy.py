# SPDX-License-Identifier: Apache-2.0
"""A running HAProxy reads every quoted text as exactly that text: it answers with what it read."""

from __future__ import annotations

import http.client
import random
import socket
import subprocess
import time

import pytest
from corpus import STRINGS

from amphora_driver.errors import QuotingError
from amphora_driver.render import quoting

SPECIAL = " '\"\\#$%{}[]()-_./:@,;|&~<>é€ab0"


def texts() -> list[str]:
    chance = random.Random(1)  # the same texts in every run
    made = ["".join(chance.choices(SPECIAL, k=chance.randint(1, 30))) for _ in range(300)]
    return [*STRINGS, *made]


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("haproxy")
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


@pytest.mark.parametrize(
    ("quote", "keyword"), [(quoting.text, "string"), (quoting.log_format, "lf-string")], ids=["text", "log_format"]
)
def test_haproxy_reads_what_was_meant(quote, keyword, tmp_path):
    wanted, rules = [], []
    for value in texts():
        try:
            quoted = quote(value, "it")
        except QuotingError:
            continue
        rule = f"http-request return status 200 content-type text/plain {keyword} {quoted}"
        rules.append(f"    {rule} if {{ path /{len(wanted)} }}")
        wanted.append(value)
    assert len(wanted) > 300
    sock = tmp_path / "s"
    lines = ["defaults", "    mode http", "    timeout client 9s", "frontend f", f"    bind unix@{sock}", *rules, ""]
    (tmp_path / "cfg").write_text("\n".join(lines))
    process = subprocess.Popen(["haproxy", "-db", "-f", str(tmp_path / "cfg")], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not sock.exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        connection = _Connection(str(sock))
        got = []
        for number in range(len(wanted)):
            connection.request("GET", f"/{number}")
            got.append(connection.getresponse().read().decode())
        connection.close()
    finally:
        process.terminate()
        process.wait(10)
    assert got == wanted
