# SPDX-License-Identifier: Apache-2.0
"""Lines that the agent accepts never let HAProxy open a file outside the bundle.

`AMPHORA_EXAMPLES` sets the number of random lines of the extended test.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest
from haproxy_versions import VERSIONS, every_version
from test_hostile_agent import rendered
from watched_haproxy import Lines

from amphora_agent.apply.bundle_check import refuse_directives
from amphora_agent.errors import ConfigurationRefused
from amphora_agent.haproxy.config_parser import parse

GOLDEN = Path(__file__).parents[1] / "golden"
# Directives of Octavia's template that the golden files lack.
OCTAVIAS = (
    "redirect scheme https if !{ ssl_fc }",
    "redirect code 302 location https://x.test/ if a",
    "acl a req.hdr(x) -m reg ^a\\\\d$",
    "option httpchk GET /a HTTP/1.1",
    "http-check expect rstatus 200|201",
    "stick store-response res.cook(a)",
    "bind 198.51.100.5:443 ssl crt-list tls/a/b.pem no-sslv3",
    "log-format a\\ %{+Q}r\\ %[ssl_c_verify]",
)
EXTENDED = int(os.environ.get("AMPHORA_EXAMPLES") or 40_000)
PATHS = ("{0}/secret", "../outside/secret", "{0}", "@{0}/secret", "unix@{0}/secret", '"{0}/secret"', "\\x2f{1}/secret")
# Every way of the manual to name a file, with % in place of the path.
NAMING = (
    "acl x path -f %",
    "acl x path -i -f %",
    "acl x path -m str -f % -- y",
    "acl x path -M -f %",
    "acl x path,map(%) -m found",
    "acl x path,map_reg(%,y) a",
    "acl x src,map_ip(%) -m found",
    "http-request deny if { path -f % }",
    "http-request deny if { path,map_beg(%) -m found }",
    "http-request return status 200 content-type text/plain file % if { path /x }",
    "http-request return status 200 content-type text/plain lf-file %",
    "http-request return status 500 errorfile %",
    "http-request deny deny_status 403 errorfile %",
    "http-request redirect location %[path,map(%)]",
    "http-request set-header X %[path,map(%)]",
    "http-request set-var(txn.a) path,map(%)",
    "http-request set-map(%) a b",
    "http-request add-acl(%) a",
    "redirect location %[path,map(%)]",
    "use_backend %[path,map(%)]",
    "log-format %{+Q}[path,map(%)]",
    "stick on path,map(%)",
    "errorfile 503 %",
    "bind :1 ssl crt %",
    "bind 192.0.2.1:1 ssl crt %",
    "bind 192.0.2.1:1 ssl crt-list %",
    "bind 192.0.2.1:1 ssl crt tls/a/b.pem ca-file %",
    "bind 192.0.2.1:1 ssl tls-ticket-keys %",
    "server s 192.0.2.1:1 ssl verify required ca-file %",
    "server s 192.0.2.1:1 ssl crt %",
    "filter spoe engine a config %",
    "load-server-state-from-file local",
)

# Lines in which a path is only text.
TEXT = (
    "acl x path -m str -- -f %",
    "acl x path,lower -i -m beg -- -M -f %",
    "acl x path -m reg % %",
    "http-request deny if { path -m sub % }",
    "http-request return status 200 content-type text/plain string %",
    "http-request redirect location %",
    "http-request set-header X %",
    "http-check expect rstatus %",
    "option httpchk GET %",
    "log-format %",
    "stick match req.cook(%)",
)


def refused(line: str) -> bool:
    try:
        refuse_directives(parse(f"backend b\n{line}"), ())
    except ConfigurationRefused:
        return True
    return False


def named(line: str, path: str) -> str:
    return re.sub(r"(?<![\w])%(?![\[{])", lambda _: path, line)


@pytest.mark.parametrize("line", NAMING)
def test_a_line_that_names_a_file_is_refused(line, tmp_path):
    for path in (each.format(tmp_path, str(tmp_path)[1:]) for each in PATHS):
        assert refused(f"    {named(line, path)}")


def test_haproxy_opens_those_files_without_the_filter(tmp_path):
    """The inotify watch works: without the filter, HAProxy opens the file for these lines."""
    lines = Lines(VERSIONS[0].here(), tmp_path)
    wanted = [f"    {named(line, str(lines.outside / 'secret'))}" for line in NAMING]
    # HAProxy opens some of the files only if all other lines are correct.
    assert len(lines.culprits(wanted)) > len(wanted) // 2
    lines.watch.close()


@every_version
def test_a_path_as_text_is_accepted_and_not_opened(version, tmp_path):
    lines = Lines(version.here(), tmp_path)
    wanted = [f"    {named(line, str(lines.outside / 'secret'))}" for line in TEXT]
    assert [line for line in wanted if refused(line)] == []
    assert lines.culprits(wanted) == []
    lines.watch.close()


@lru_cache
def bases() -> tuple[str, ...]:
    text = "".join(file.read_text() for file in sorted(GOLDEN.glob("*.cfg")))
    found = [line.strip() for line in text.splitlines() if line.startswith(" ")]
    return tuple(dict.fromkeys([*OCTAVIAS, *found]))


@lru_cache
def keywords() -> tuple[str, ...]:
    """Return every word that HAProxy knows; a word with arguments ends with a parenthesis."""
    program = VERSIONS[0].here().program
    assert program
    run = subprocess.run(
        [program, "-dKall", "-q", "-c", "-f", "/dev/null"], capture_output=True, text=True, check=False
    )
    words = re.findall(r"^\s+([a-z@][\w.*-]*\(?)", run.stdout, re.MULTILINE)
    return tuple(dict.fromkeys(words))


ANYWHERE = "/a-folder/outside"


@lru_cache
def accepted(number: int) -> tuple[str, ...]:
    """Return the accepted lines among this number of random lines; the seed is fixed."""
    chosen = random.Random(number)
    paths = [path.format(ANYWHERE, ANYWHERE[1:]) for path in PATHS]
    starts = ("path", "src", "req.hdr(x)", "str(a)")
    plain = ("-f", "--", "-M", "-m", "reg", "if", "{", "}", "file", "crt", "ca-file", "''", '"$HOME"', "\\ ", "a", "1")

    def call() -> str:
        name = chosen.choice(keywords())
        return f"{name}{chosen.choice((*paths, 'a', '-f', 'x,y', ''))})" if name.endswith("(") else name

    def word() -> str:
        converted = f"{chosen.choice(starts)},{call()}"
        path = chosen.choice(paths)
        joined = chosen.choice(bases()).split(" ")[-1] + path
        return chosen.choice((path, call(), converted, f"%[{converted}]", joined, f"'{path}'", chosen.choice(plain)))

    def line() -> str:
        if chosen.random() < 0.2:
            return " ".join(word() for _ in range(chosen.randint(1, 6)))
        words = chosen.choice(bases()).split(" ")
        for _ in range(chosen.choice((1, 1, 2, 3))):
            at = chosen.randint(0, len(words))
            words[at : at + chosen.randint(0, 1)] = [word()]
        return " ".join(words)

    lines = dict.fromkeys(f"    {line()}" for _ in range(number))
    return tuple(each for each in lines if not refused(each))


def try_all(version, place, number):
    lines = Lines(version.here(), place)
    tried = [each.replace(ANYWHERE, str(lines.outside)) for each in accepted(number)]
    assert len(tried) > number // 50, "almost no random line is accepted, so the test is void"
    assert sum(str(lines.outside) in each for each in tried) > len(tried) // 10
    assert lines.culprits(tried) == []
    lines.watch.close()


@every_version
def test_an_accepted_line_opens_no_file_outside(version, tmp_path):
    try_all(version, tmp_path, 3_000)


@pytest.mark.extended
@every_version
def test_many_accepted_lines_open_no_file_outside(version, tmp_path):
    try_all(version, tmp_path, EXTENDED)


# -- all system calls -------------------------------------------------------------------------------------------

SYSTEM = re.compile(
    r"/(?:etc/(?:ld\.so\.\w+|ssl/\S+|localtime|nsswitch\.conf|passwd|group|resolv\.conf|host\.conf|hosts)|usr/|lib|dev/|"
    r"proc/|sys/(?:devices/system/|fs/cgroup))"
)


@pytest.mark.extended
def test_haproxy_opens_only_its_own_files_and_the_bundle(tmp_path):
    """Checks every opened file, started program and connected socket of the process with strace."""
    strace = shutil.which("strace") or pytest.skip("strace is not installed; the other tests use inotify")
    lines = Lines(VERSIONS[0].here(), tmp_path)
    wanted = [line for line in rendered().splitlines() if line.startswith(" ")]
    tried = list(dict.fromkeys([*(f"    {line}" for line in OCTAVIAS), *wanted, *accepted(3_000)]))
    assert not any(map(refused, tried))
    log = tmp_path / "log"
    traced = [strace, "-f", "-qq", "-e", "trace=open,openat,openat2,execve,connect,bind", "-o", str(log)]
    subprocess.run([*traced, *lines.command(tried)], capture_output=True, check=False)
    calls = log.read_text().splitlines()
    opened = [re.search(r'open\w*\([^"]*"([^"]*)"', call) for call in calls]
    own = (str(tmp_path / "bundle"), str(tmp_path / "lines.cfg"))
    names = {found[1] for found in opened if found}
    assert names > {own[1]}
    wrong = {name for name in names if name.startswith("/") and not name.startswith(own) and not SYSTEM.match(name)}
    # A relative name is in the directory of the bundle, which HAProxy has entered.
    wrong |= {name for name in names if not name.startswith(("/", "tls/"))}
    assert wrong == set()
    assert sum("execve(" in call for call in calls) == 1
    assert not any(call for call in calls if re.search(r"\b(?:connect|bind)\(", call))
    lines.watch.close()
