# SPDX-License-Identifier: Apache-2.0
"""Changes of files that a running HAProxy has loaded: runtime updates and reloads."""

from __future__ import annotations

import hashlib

import pytest

from amphora_agent.bundle import File
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.runtime_actions import (
    AddTicketKeys,
    AddToCrtList,
    LoadFile,
    RemoveFromCrtList,
    UnloadFile,
)
from amphora_agent.haproxy.tls_diff import MAX_COMMAND_LENGTH, NO_CHANGES, TlsState, compare_files

LIST, DEFAULT, SNI, OTHER = (f"tls/l/{name}" for name in ("certificates.list", "default.pem", "sni-1.pem", "sni-2.pem"))
CLIENT_CA, CLIENT_CRL, CA, CRL = "tls/l/client_ca.pem", "tls/l/client_crl.pem", "tls/p/ca.pem", "tls/p/crl.pem"
CLIENT, KEYS = "tls/p/client.pem", "tls/lb/ticket.keys"
BIND = f"ssl crt-list {LIST}"
ASKING = f"{BIND} ca-file {CLIENT_CA} verify required no-tls-tickets crl-file {CLIENT_CRL}"


def side(files: dict[str, str], *servers: str, bind: str = BIND) -> TlsState:
    lines = "".join(f"    server s{n} 192.0.2.1:{n} ssl {words}\n" for n, words in enumerate(servers, 1))
    text = f"frontend l\n    bind 198.51.100.5:443 {bind}\n    bind [2001:db8::5]:443 {bind}\nbackend p:l\n{lines}"
    made = tuple(File(name, hashlib.sha256(content.encode()).hexdigest()) for name, content in files.items())
    return TlsState(parse(text), made, files)


def listed(*names: str, **more: str) -> dict[str, str]:
    return {LIST: "".join(f"{name}\n" for name in names), **{name.split()[0]: f"content {name}" for name in names}}


ONE, TWO = listed(DEFAULT), listed(DEFAULT, SNI)


def test_equal_files_need_no_change():
    assert compare_files(side(TWO), side(TWO)) == NO_CHANGES


@pytest.mark.parametrize(
    ("old", "new", "before", "after"),
    [
        (side(ONE), side({**ONE, DEFAULT: "x"}), (LoadFile("cert", DEFAULT),), ()),
        (side(ONE), side(TWO), (LoadFile("cert", SNI), AddToCrtList(LIST, SNI)), ()),
        (side(TWO), side(ONE), (), (RemoveFromCrtList(LIST, SNI), UnloadFile("cert", SNI))),
        (
            side(TWO),
            side(listed(DEFAULT, OTHER)),
            (LoadFile("cert", OTHER), AddToCrtList(LIST, OTHER)),
            (RemoveFromCrtList(LIST, SNI), UnloadFile("cert", SNI)),
        ),
        (side(listed(DEFAULT, SNI, OTHER)), side(listed(DEFAULT, OTHER, SNI)), (), ()),
        (
            side({**ONE, CLIENT_CA: "a", CLIENT_CRL: "b"}, bind=ASKING),
            side({**ONE, CLIENT_CA: "c", CLIENT_CRL: "d"}, bind=ASKING),
            (LoadFile("crl-file", CLIENT_CRL), LoadFile("ca-file", CLIENT_CA)),
            (),
        ),
        # The file existed before, but no line used it.
        (side({**ONE, CA: "a"}), side({**ONE, CA: "a"}, f"ca-file {CA}"), (LoadFile("ca-file", CA),), ()),
        (side({**ONE, CA: "a"}, f"ca-file {CA}"), side({**ONE, CA: "a"}), (), (UnloadFile("ca-file", CA),)),
        # The file is not used by any line.
        (side(ONE), side({**ONE, OTHER: "x"}), (), ()),
    ],
)
def test_certificates_are_replaced_by_runtime_updates(old, new, before, after):
    found = compare_files(old, new)
    assert (found.before, found.after, found.obstacles) == (before, after, ())
    assert bool(found.reasons) == (old.files != new.files)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (side(ONE), side(listed(SNI, DEFAULT)), "begins with another certificate"),
        (side(ONE), side(listed(DEFAULT, f"{SNI} [alpn h2]")), "has options besides names"),
        (side(ONE), side({**ONE, LIST: f"{DEFAULT}\n{DEFAULT}\n"}), "names a certificate twice"),
        (
            side(ONE),
            side({**ONE, DEFAULT: "x" * (MAX_COMMAND_LENGTH + 1)}),
            f"has {MAX_COMMAND_LENGTH + 1} characters, too many for the stats socket",
        ),
        (
            side({**ONE, CLIENT_CA: "a"}, bind=f"{BIND} ca-file {CLIENT_CA} verify required"),
            side({**ONE, CLIENT_CA: "b"}, bind=f"{BIND} ca-file {CLIENT_CA} verify required"),
            "clients could resume sessions",
        ),
    ],
)
def test_other_file_changes_need_a_reload(old, new, why):
    (obstacle,) = compare_files(old, new).obstacles
    assert why in obstacle
    assert "listener l" in obstacle


@pytest.mark.parametrize(("words", "name"), [("ca-file", CA), ("crl-file", CRL), ("crt", CLIENT)])
def test_a_new_worker_reads_the_cas_of_members(words, name):
    (obstacle,) = compare_files(*(side({**ONE, name: text}, f"{words} {name}") for text in "ab")).obstacles
    assert obstacle.startswith(f"file {name} of pool p connections to members")


def keys(*names: str) -> TlsState:
    return side({**ONE, KEYS: "".join(f"{name}\n" for name in names)}, bind=f"{BIND} tls-ticket-keys {KEYS}")


@pytest.mark.parametrize(
    ("new", "count"),
    [("bcd", 1), ("cde", 2), ("def", 3), ("zabc", 0), ("acb", 3)],
)
def test_ticket_keys_are_rotated_by_runtime_updates(new, count):
    found = compare_files(keys("a", "b", "c"), keys(*new))
    assert found.before == ((AddTicketKeys(KEYS, count),) if count else ())
    assert found.obstacles == ()
    assert found.reasons == (f"file {KEYS} of load balancer lb has another content",)


@pytest.mark.parametrize("new", [["a", "b"], ["b", "c", "dd"]])
def test_ticket_keys_without_overlap_need_a_reload(new):
    (obstacle,) = compare_files(keys("a", "b", "c"), keys(*new)).obstacles
    assert "load balancer lb" in obstacle


def test_logs_contain_no_file_content():
    old, new = keys("a", "b", "c"), keys("secret1", "secret2", "secret3")
    assert "secret" not in repr(new) + repr(compare_files(old, new))
