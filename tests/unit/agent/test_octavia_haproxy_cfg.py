# SPDX-License-Identifier: Apache-2.0
"""Octavia's HAProxy configuration as the text of a bundle, line by line."""

import hashlib
import itertools
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora_agent.bundle import File
from amphora_agent.errors import ConfigurationRefused, RequestRefused
from amphora_agent.haproxy import config_parser
from amphora_agent.octavia_api_v1 import uploads
from amphora_agent.octavia_api_v1.haproxy_cfg import draining, translate

LB = "1b000000-0000-4000-8000-000000000001"
CERTS = f"/var/lib/octavia/certs/{LB}"
MACHINE = """\
# of a load balancer
global
    daemon
    stats socket /var/lib/octavia/x.sock mode 0666 level user
    maxconn 150000
    nbthread 3

defaults
    log global

peers abc_peers
    peer QWxhZGRpbg 198.51.100.11:1025
"""


def line(text, within="backend p:l"):
    """One translated line of a section."""
    [head, found] = translate(f"{within}\n    {text}\n", LB).text.splitlines()
    assert head == within
    return found.strip()


@pytest.mark.parametrize(
    ("uploaded", "served"),
    [
        ("option httpchk GET /health", "option httpchk GET /health"),
        ("stick-table type ipv6 size 10k", "stick-table type ipv6 size 10k peers amphora"),
        ("stick-table type ipv6 size 10k peers 1b0_peers", "stick-table type ipv6 size 10k peers amphora"),
        ("server m 192.0.2.1:80 weight 1 ssl verify none", "server m 192.0.2.1:80 weight 1 ssl verify none"),
        (
            f"server m 192.0.2.1:80 ssl crt {CERTS}/a1.pem ca-file {CERTS}/b2.pem crl-file {CERTS}/c3.pem",
            f"server m 192.0.2.1:80 ssl crt tls/{LB}/a1.pem ca-file tls/{LB}/b2.pem crl-file tls/{LB}/c3.pem",
        ),
        ("default_backend prometheus-exporter-internal", "default_backend amphora:metrics"),
        ("option external-check", "option httpchk"),
        ("http-request set-header a crt /etc/passwd", "http-request set-header a crt /etc/passwd"),
    ],
)
def test_lines_are_translated(uploaded, served):
    if "external-check" not in uploaded:
        assert line(uploaded) == served
    else:
        assert served in translate(f"backend p:l\n    {uploaded}\n", LB).text


def test_lines_of_the_amphora_are_blanked_in_place():
    found = translate(f"{MACHINE}\nfrontend l\n    bind 198.51.100.5:80\n    bind 2001:db8::5:443\n", LB)
    lines = found.text.split("\n")
    assert len(lines) == len(MACHINE.split("\n")) + 4
    assert [each for each in lines if each] == [
        "# of a load balancer",
        "defaults",
        "    log global",
        "frontend l",
        "    bind 198.51.100.5:80",
        "    bind 2001:db8::5:443",
    ]
    assert lines[7] == "defaults"
    assert (found.connections, found.threads, found.ports) == (150000, 3, {80, 443})
    config_parser.parse(found.text)


def test_the_exporter_is_not_served():
    text = (
        "frontend prometheus-exporter-internal-endpoint\n    bind 127.0.0.1:9101\n"
        "backend prometheus-exporter-internal\n    server prometheus-internal 127.0.0.1:9102\n"
        "frontend l\n    bind 192.0.2.1:8088\n    default_backend prometheus-exporter-internal\n"
    )
    found = translate(text, LB)
    assert list(config_parser.parse(found.text).frontends) == ["l"]
    assert not config_parser.parse(found.text).backends
    assert found.ports == {8088}


def test_ping_checks_are_done_by_the_agent():
    text = (
        "backend p:l\n    option external-check\n    external-check command /var/lib/octavia/ping-wrapper.sh\n"
        "    server m1 192.0.2.1:80 weight 1 check inter 2s fall 2 rise 2\n"
        "    server m2 2001:db8::7:80 weight 1 check inter 2s fall 2 rise 2 addr 192.0.2.9 port 81\n"
        "    server m3 192.0.2.3:80 weight 1 disabled\n"
    )
    found = translate(text, LB)
    assert found.pings == {"m1": ip_address("192.0.2.1"), "m2": ip_address("192.0.2.9")}
    servers = [each.strip() for each in found.text.splitlines() if " server " in each]
    assert servers == [
        "server m1 192.0.2.1:80 weight 1 check inter 2s fall 2 rise 2 addr 127.0.0.1 port 9101",
        "server m2 2001:db8::7:80 weight 1 check inter 2s fall 2 rise 2 addr 127.0.0.1 port 9101",
        "server m3 192.0.2.3:80 weight 1 disabled",
    ]
    assert "http-check send meth GET uri-lf '/ping/%[srv_name]'" in found.text
    assert "ping-wrapper" not in found.text


def test_members_with_weight_zero_are_drained():
    servers = ["a 192.0.2.1:80 weight 0", "b 192.0.2.2:80 weight 1", "c 192.0.2.3:80"]
    text = "backend p:l\n" + "".join(f"    server {each}\n" for each in servers)
    assert draining(text) == {("p:l", "a")}


@pytest.mark.parametrize(
    "path",
    [
        "/var/lib/octavia/certs/1b000000-0000-4000-8000-000000000002/a.pem",
        f"{CERTS}/../../../../etc/shadow",
        f"{CERTS}/.hidden.pem",
        "/etc/amphora-agent/server.pem",
    ],
)
def test_files_of_another_load_balancer_are_refused(path):
    with pytest.raises(RequestRefused, match="is no file of load balancer"):
        translate(f"frontend l\n    bind 192.0.2.1:443 ssl crt-list {path}\n", LB)


def test_another_section_is_kept_and_refused_with_its_line():
    text = translate(f"{MACHINE}program x\n    command /bin/sh\n", LB).text
    with pytest.raises(ConfigurationRefused, match="line 13: a 'program' section"):
        config_parser.parse(text)


@pytest.mark.parametrize("kind", ["global", "peers x"])
def test_amphora_sections_may_occur_once(kind):
    with pytest.raises(RequestRefused, match=f"line 13: a second '{kind.split()[0]}' section"):
        translate(f"{MACHINE}{kind}\n    nbthread 1\n", LB)


WORDS = [
    "global",
    "defaults",
    "frontend",
    "backend",
    "peers",
    "listen",
    "    bind",
    "    server",
    "    stick-table",
    "    option",
    "external-check",
    "check",
    "addr",
    "port",
    "peers",
    "crt",
    "crt-list",
    f"{CERTS}/a.pem",
    "/x/y.pem",
    "192.0.2.1:80",
    ":99999",
    "maxconn",
    "7",
    "a",
    "#",
    "\\",
    '"',
    "prometheus-exporter-internal",
    "\t",
    "\r",
]


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join), max_size=8))
def test_any_upload_is_translated_or_refused(lines):
    try:
        found = translate("\n".join(lines), LB)
    except RequestRefused:
        return
    assert found.text.count("\n") == max(0, len(lines) - 1)
    try:
        parsed = config_parser.parse(found.text)
    except ConfigurationRefused:
        return
    assert {section.kind for section in parsed.sections} <= {"defaults", "frontend", "backend"}
    assert not any(word.startswith("/") and word.endswith(".pem") for word in crt_words(parsed))


def crt_words(parsed):
    for section in parsed.sections:
        for each in [*section.lines, *(server.line for server in section.servers)]:
            if each.words[0] in ("bind", "server"):
                yield from (after for before, after in itertools.pairwise(each.words) if before in ("crt", "crt-list"))


# -- files ---------------------------------------------------------------------------------------------------

PEM = "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"


def test_named_files_are_included():
    uploaded = {
        "list.pem": f"{CERTS}/one.pem\n{CERTS}/two.pem [alpn h2] *.example.com\n\n",
        "one.pem": PEM,
        "two.pem": PEM + "2",
        "stale.pem": PEM,
    }
    found = uploads.collect(["list.pem"], uploaded.get, LB)
    content = f"tls/{LB}/one.pem\ntls/{LB}/two.pem [alpn h2] *.example.com\n\n"
    assert found[0] == File(f"tls/{LB}/list.pem", hashlib.sha256(content.encode()).hexdigest())
    assert [file.content for file in found] == [content, PEM, PEM + "2"]


@pytest.mark.parametrize(
    ("uploaded", "why"),
    [
        ({}, "list.pem was not uploaded"),
        ({"list.pem": f"{CERTS}/gone.pem\n"}, "gone.pem was not uploaded"),
        ({"list.pem": "/etc/shadow\n"}, "shadow"),
    ],
)
def test_unavailable_files_are_refused(uploaded, why):
    with pytest.raises(RequestRefused, match=why):
        uploads.collect(["list.pem"], uploaded.get, LB)


@pytest.mark.parametrize("name", ["a.pem", "0123abcdef.pem", f"{LB}.pem", "a_b-c.d.pem"])
def test_names_of_files_are_accepted(name):
    assert uploads.checked_name(name) == name


@pytest.mark.parametrize("name", ["", ".pem", "..pem", "a.crt", "a/b.pem", "../a.pem", "a.pem/", "A.pem", "a.pem\n"])
def test_invalid_names_of_files_are_refused(name):
    with pytest.raises(RequestRefused) as refused:
        uploads.checked_name(name)
    assert refused.value.document()["message"] == "Filename has wrong format"


def test_file_contents_are_text():
    assert uploads.checked_content("a.pem", PEM.encode()) == PEM
    for body in (b"\xff\xfe", b"a\0b"):
        with pytest.raises(RequestRefused, match="is not text"):
            uploads.checked_content("a.pem", body)
