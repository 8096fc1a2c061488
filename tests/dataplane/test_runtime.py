# SPDX-License-Identifier: Apache-2.0
"""Runtime updates of HAProxy, and persistence that survives a reload: by cookie and by stick table."""

from __future__ import annotations

import http.client
import os
import re
import signal

import pytest
from amphora_lab import VIP, Client, eventually
from configuration_text import CHECK, LISTENER, POOL, listener, text
from every_haproxy import RuntimeSocket

from amphora_agent.haproxy import features
from amphora_agent.haproxy.config_diff import _NOT_AT_RUNTIME

pytestmark = pytest.mark.root

BACKEND = f"{POOL}:{LISTENER}"
COOKIE = f'    cookie SRV insert indirect nocache dynamic httponly attr "SameSite=Lax"\n    dynamic-cookie-key {POOL}\n'
TABLE = "    stick-table type ipv6 size 10k expire 1h peers amphora\n    stick on src\n"


def ask(amphora, cookie: str | None = None) -> tuple[str, str | None]:
    """Return the answering member and its cookie."""

    def run():
        connection = http.client.HTTPConnection(VIP, timeout=5)
        try:
            connection.request("GET", "/", headers={"Cookie": f"SRV={cookie}"} if cookie else {})
            with connection.getresponse() as answer:
                assert answer.status == 200
                given = re.match(r"SRV=([^;]*)", answer.getheader("Set-Cookie", ""))
                return answer.read().decode(), given and given.group(1)
        finally:
            connection.close()

    return amphora.network.thread("cl").run(run)


def visit_all(amphora, wanted) -> dict[str, str]:
    """Return the cookie of each member, learned from answers."""
    cookies: dict[str, str] = {}
    for _ in range(12 * len(wanted)):
        name, given = ask(amphora)
        assert given, f"{name} sets no cookie"
        assert cookies.setdefault(name, given) == given
    assert cookies.keys() == set(wanted)
    assert len(set(cookies.values())) == len(cookies)
    return cookies


def follows(amphora, cookies) -> None:
    for name, cookie in cookies.items():
        assert {ask(amphora, cookie) for _ in range(4)} == {(name, None)}


def test_a_member_added_at_runtime_gets_a_cookie_and_the_others_keep_theirs(amphora):
    amphora.push(1, text(listener(["m1", "m2"], extra=COOKIE)))
    old = visit_all(amphora, ["m1", "m2"])
    status, answer = amphora.push(2, text(listener(["m1", "m2", "m3"], extra=COOKIE)))
    assert (status, answer.get("how")) == (200, "runtime"), answer
    cookies = visit_all(amphora, ["m1", "m2", "m3"])
    assert old.items() <= cookies.items()
    follows(amphora, cookies)
    status, answer = amphora.push(3, text(listener(["m1", "m2", "m3"], extra=f"{COOKIE}    fullconn 77\n")))
    assert (status, answer.get("how")) == (200, "reload"), answer
    follows(amphora, cookies)
    before = amphora.status("haproxy")["pid"]
    os.kill(amphora.outside_pid(before), signal.SIGKILL)
    eventually(lambda: amphora.status("haproxy")["pid"] not in (None, before), "HAProxy is started again")
    eventually(lambda: answers(amphora), "HAProxy serves again")
    follows(amphora, cookies)
    # A member is added as disabled, and enabled later.
    off = f"weight 1 {CHECK} disabled"
    status, answer = amphora.push(4, text(listener(["m1"], extra=f"{COOKIE}    fullconn 77\n")))
    assert (status, answer.get("how")) == (200, "runtime"), answer
    for generation, keywords in ((5, {"m2": off}), (6, {})):
        wanted = text(listener(["m1", "m2"], extra=f"{COOKIE}    fullconn 77\n", **keywords))
        status, answer = amphora.push(generation, wanted)
        assert (status, answer.get("how")) == (200, "runtime"), answer
    follows(amphora, {name: cookies[name] for name in ("m1", "m2")})


def answers(amphora) -> bool:
    try:
        return bool(ask(amphora))
    except (OSError, AssertionError):
        return False


def test_stick_tables_survive_consecutive_reloads(amphora):
    def wanted(number: int) -> str:
        return text(listener(["m1", "m2", "m3"], extra=f"{TABLE}    fullconn {number}\n"))

    amphora.push(1, wanted(1))
    # The first worker has no predecessor: its stick table is empty.
    assert amphora.push(2, wanted(2))[1]["how"] == "reload"
    key = f"::ffff:{VIP.rpartition('.')[0]}.20"
    ask(amphora)
    amphora.ask_haproxy(f"clear table {BACKEND} key {key}")
    stuck, _ = ask(amphora)
    # A new worker with an empty table would choose m1.
    assert stuck != "m1"
    for generation in range(3, 7):
        status, answer = amphora.push(generation, wanted(generation))
        assert (status, answer.get("how")) == (200, "reload"), answer
        assert f"key={key} " in amphora.ask_haproxy(f"show table {BACKEND}")
        assert {ask(amphora)[0] for _ in range(2)} == {stuck}


KEYWORDS = [
    "backup",
    "check check-send-proxy send-proxy",
    "check check-ssl verify none",
    "check addr 127.0.0.1 port 9101 inter 5s fall 2 rise 3",
    "ssl verify none alpn h2,http/1.1 sni str(www.example.com)",
    "ssl verify none sni 'str(www.example.com)'",
    "ssl verify none check check-ssl check-sni www.example.com check-alpn http/1.1",
    "ssl verify none ciphers ECDHE+AESGCM ciphersuites TLS_AES_128_GCM_SHA256 ssl-min-ver TLSv1.2",
    "ssl verify none verifyhost www.example.com",
    "send-proxy-v2",
    "send-proxy-v2-ssl",
    "proto h2",
    "maxconn 7 maxqueue 3",
    "id 4711",
    "disabled",
]


def test_server_options_that_change_at_run_time(amphora):
    amphora.push(1, text(listener(["m1"])))
    generation = 1
    for keywords in KEYWORDS:
        for wanted in (["m1", "m2"], ["m1"]):
            generation += 1
            status, answer = amphora.push(generation, text(listener(wanted, m2=keywords)))
            assert (status, answer.get("how")) == (200, "runtime"), (keywords, answer)
    spaces = """ssl verify none sni 'str("a b")'"""
    status, answer = amphora.push(generation + 1, text(listener(["m1", "m2"], m2=spaces)))
    assert (status, answer.get("how")) == (200, "reload"), answer
    assert "quoting" in answer["reason"]


VALUES = {"namespace": "x", "init-addr": "none", "resolvers": "x", "tcp-ut": "5s", "max-reuse": "3", "cookie": "x"}


def test_haproxy_refuses_the_other_options_at_run_time(amphora):
    """HAProxy refuses each option of the list, except options that only newer versions refuse."""
    amphora.push(1, text(listener(["m1"])))
    taken = {"cookie"} if features.probe_features(RuntimeSocket(amphora)).cookies else set()
    for number, word in enumerate(sorted(_NOT_AT_RUNTIME - {"enabled", "track"} - taken)):
        value = VALUES.get(word, "x") if not word.startswith("no") else ""
        answer = amphora.ask_haproxy(f"add server {BACKEND}/n{number} 192.0.2.1:80 {word} {value}")
        assert "is not accepted for dynamic server" in answer, (word, answer)


@pytest.mark.parametrize(
    ("balance", "joins"),
    [
        ("leastconn", True),
        ("first", True),
        ("random", True),
        ("source", False),
        ("static-rr", False),
        ("hash src", False),
        ("hash src,ipmask(24)\n    hash-type consistent", True),
        ("hdr(host)\n    hash-type consistent sdbm avalanche", True),
    ],
)
def test_algorithms_that_permit_new_servers_at_runtime(amphora, balance, joins):
    extra = f"    balance {balance}\n"
    amphora.push(1, text(listener(["m1"], extra=extra)))
    with Client(amphora.network) as client:
        status, answer = amphora.push(2, text(listener(["m1", "m2"], extra=extra)))
        assert (status, answer.get("how")) == (200, "runtime" if joins else "reload"), answer
        before = client.total
        eventually(lambda: client.total > before + 5, "further answers")
    assert client.failures == []
