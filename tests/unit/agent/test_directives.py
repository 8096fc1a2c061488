# SPDX-License-Identifier: Apache-2.0
"""The allow-list of HAProxy directives, and lists of certificates."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from amphora_agent.apply.bundle_check import refuse_directives
from amphora_agent.bundle import File
from amphora_agent.directives import allowed
from amphora_agent.directives.allowed import refused_crt_list_line
from amphora_agent.errors import ConfigurationRefused
from amphora_agent.haproxy.config_parser import parse

GOLDEN = Path(__file__).parents[2] / "golden"
LB = "1b000000-0000-4000-8000-000000000001"
LIST = f"tls/{LB}/certificates.list"


def judge(*lines, files=()):
    refuse_directives(parse("".join(f"{line}\n" for line in ("defaults", "backend pool:listener", *lines))), files)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.cfg")), ids=lambda file: file.stem)
def test_the_rendered_template_is_accepted(file):
    refuse_directives(parse(file.read_text(encoding="utf-8")), ())


@pytest.mark.parametrize(
    "line",
    [
        "acl a path -m str -- -f /etc/shadow",
        "acl a req.hdr(x),lower -i -m beg /etc/shadow",
        'acl a path,regsub("^/x\\\\)","","i") -m len 1:'.replace('"', "'\"'"),
        "http-request set-header X '%{+Q}[ssl_c_s_dn(cn)] %% %ci'",
        "http-request return status 200 content-type text/plain string '/etc/shadow' if { path / }",
        "http-request redirect location 'https://x/%%20?a=${b}' code 302 if !a b or { path -m sub /x }",
        "http-request deny deny_status 404 unless { method GET } { path /metrics }",
        "redirect code 301 prefix https://x",
        "redirect scheme https if !{ ssl_fc }",
        "default_backend amphora:metrics",
        "use_backend pool:listener if a",
        "option httpchk GET /a?b=c HTTP/1.1",
        "server a [2001:db8::1]:80 weight 1 check inter 5s addr 127.0.0.1 port 9101",
        "server a 2001:db8::1:80 ssl verify required sni str(x.test) ca-file tls/a/b.pem",
        "bind 198.51.100.5:443 ssl crt-list tls/a/b.pem verify optional alpn h2,http/1.1",
        "log-format a\\ \\\\b\\ \\'%r",
    ],
)
def test_permitted_lines_are_accepted(line):
    judge(f"    {line}")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        # reads files
        ("errorfile 503 /etc/passwd", "'errorfile'"),
        ("errorfiles x", "'errorfiles'"),
        ("acl a path -f /etc/passwd", "'acl'"),
        ("acl a path -m str x -f /etc/passwd", "'acl'"),
        ("acl a path,map(x) -m found", "'acl'"),
        ("acl a path,jwt_verify('x','/etc/passwd') -m found", "'acl'"),
        ("http-request set-header X %[path,map_str(/etc/passwd)]", "'http-request set-header'"),
        ("http-request set-header X %[env(HOME)]", "'http-request set-header'"),
        ("http-request return status 200 content-type text/plain file x", "'http-request return'"),
        ("http-request deny if { src -f /etc/passwd }", "'http-request deny'"),
        ("http-request set-var(proc.a) int(1)", "'http-request set-var…'"),
        ("http-request set-map(x) a b", "'http-request set-map…'"),
        ("use_backend %[path,map(x)]", "'use_backend'"),
        ("log-format %[path,map(x)]", "'log-format'"),
        ("load-server-state-from-file local", "'load-server-state-from-file'"),
        ("bind 192.0.2.1:443 ssl crt /etc/amphora-agent/server.pem", "'bind … crt' with its value"),
        ("bind 192.0.2.1:443 ssl crt tls/a/../../b", "'bind … crt' with its value"),
        ("bind 192.0.2.1:443 ssl crt tls/a", "'bind … crt' with its value"),
        ("server a 192.0.2.1:80 ssl ca-file @system-ca", "'server … ca-file' with its value"),
        # runs programs or scripts
        ("external-check command /bin/sh", "'external-check'"),
        ("option external-check", "'option external-check'"),
        ("filter spoe engine x config y", "'filter'"),
        ("http-request lua.x", "'http-request lua.x'"),
        ("http-request use-service lua.x", "'http-request use-service'"),
        # opens sockets
        ("log 192.0.2.1:514 local0", "'log'"),
        ("log /dev/log local0", "'log'"),
        ("log stdout format raw daemon", "'log'"),
        ("stats socket /tmp/x", "'stats'"),
        ("server a 192.0.2.1:80 resolvers x", "'server … resolvers'"),
        ("server a 192.0.2.1:80 agent-check agent-port 1", "'server … agent-check'"),
        ("server a 192.0.2.1:80 source 192.0.2.9", "'server … source'"),
        ("bind 192.0.2.1:80 user root", "'bind … user'"),
        ("http-request do-resolve(txn.a,x) src", "'http-request do-resolve…'"),
        ("tcp-request content set-dst src", "'tcp-request content'"),
        ("email-alert mailers x", "'email-alert'"),
        ("use_backend amphora:certificates", "'use_backend'"),
        # misleading lines
        ("acl a path \\x2df /etc/passwd", "an environment variable or an escape"),
        ('log-format "%[${X}]"', "an environment variable or an escape"),
        ('http-request set-header X "a\\" -f b"', "an environment variable or an escape"),
        ("log-format a\\", "an environment variable or an escape"),
        ("server a 192.0.2.1:80 '' check", "'server … …'"),
        ("nonsense /etc/passwd", "'nonsense' is not among the directives"),
        ("no option forwardfor", "'no option'"),
    ],
)
def test_forbidden_lines_are_refused(line, named):
    with pytest.raises(ConfigurationRefused, match="line 3: ") as refused:
        judge(f"    {line}")
    assert named in str(refused.value)
    assert "/etc" not in refused.value.happened


@pytest.mark.parametrize(
    "endpoint",
    [
        "unix@/run/x", "abns@x", "fd@3", "sockpair@3", "/run/x", "/run/x:80", "quic4@192.0.2.1:443", "192.0.2.1",
        ":80", "*:80", "192.0.2.1:0", "192.0.2.1:65536", "192.0.2.1:80-90", "192.0.2.1:+80", "192.0.2.1:80,192.0.2.2:1",
        "x.test:80", "face:80", "0.0.0.0:80", "[::]:80", ":::80", "127.0.0.1:80", "127.9.9.9:80", "[::1]:80",
        "[::ffff:127.0.0.1]:80", "[::ffff:0.0.0.0]:80", "192.0.2.01:80", "[fe80::1%eth0]:80", "192.0.2.256:80",
        "1:2:3:80",
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", ["bind", "server a"])
def test_other_sockets_are_refused(first, endpoint):
    with pytest.raises(ConfigurationRefused, match="the address of '"):
        judge(f"    {first} {endpoint}")


def test_the_error_names_the_object():
    with pytest.raises(ConfigurationRefused) as refused:
        judge("    mode http", "    server member unix@/x")
    assert refused.value.object_id == "member"
    with pytest.raises(ConfigurationRefused) as refused:
        judge("    filter trace")
    assert refused.value.object_id == "pool"


def test_the_verdict_on_a_line_is_cached(monkeypatch):
    judged = []
    refusal = allowed.refusal
    monkeypatch.setattr(allowed, "refusal", lambda words: judged.append(words) or refusal(words))
    text = "backend b\n" + "".join(f"    server s{n} 192.0.2.1:{n}\n" for n in range(1, 100))
    before = parse(text)
    refuse_directives(before, ())
    assert len(judged) == 100
    refuse_directives(parse(text.replace("s50 ", "other "), before), ())
    assert judged[100:] == [("server", "other", "192.0.2.1:50")]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", None),
        (f"tls/{LB}/a.pem\n\n# tls\n  tls/{LB}/b.pem [alpn h2,http/1.1] *.x.test !a.x.test # x\n", None),
        (f"tls/{LB}/a.pem\n/etc/amphora-agent/server.pem\n", 2),
        (f"tls/{LB}/../../a.pem\n", 1),
        (f"tls/{LB}/a.pem [ca-file /etc/passwd]\n", 1),
        (f"tls/{LB}/a.pem [alpn h2 verify none]\n", 1),
        (f"tls/{LB}/a.pem\r/etc/x\n", 1),
        (f"tls/{LB}\n", 1),
    ],
)
def test_lists_of_certificates_are_checked(text, line):
    assert refused_crt_list_line(text) == line


def test_a_list_is_checked_where_it_is_named():
    content = "/etc/amphora-agent/server.pem\n"
    file = File(LIST, hashlib.sha256(content.encode()).hexdigest(), content)
    judge("    bind 192.0.2.1:443 ssl crt tls/a/b.pem", files=[file])
    text = f"frontend listener\n    bind 192.0.2.1:443 ssl crt-list {LIST}\n"
    with pytest.raises(ConfigurationRefused, match=r"certificates\.list, line 1") as refused:
        refuse_directives(parse(text), [file])
    assert refused.value.object_id == LB
    refuse_directives(parse(text), [File(LIST, file.sha256)])
