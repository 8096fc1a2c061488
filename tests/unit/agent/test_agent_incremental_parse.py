# SPDX-License-Identifier: Apache-2.0
"""The incremental parser: the result equals a full parse, and the cost depends on the difference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora_agent.errors import ConfigurationRefused
from amphora_agent.haproxy.config_check import MIN_SERVERS, omit_checked_servers
from amphora_agent.haproxy.config_parser import parse

HEAD = "defaults\n    timeout connect 5s\n\nfrontend f\n    bind 127.0.0.1:80\n    default_backend b\n"
LINES = [
    "    server a 192.0.2.1:80",
    "    server a 192.0.2.1:80 disabled",
    "    server b 192.0.2.2:80 weight 3",
    "",
    "  # x",
]
SECTIONS = ["backend b", "backend c", "frontend g", "    mode http", "    balance source"]


@given(
    st.lists(st.sampled_from(LINES + SECTIONS), max_size=12), st.lists(st.sampled_from(LINES + SECTIONS), max_size=12)
)
def test_incremental_and_full_parse_are_equal(old, new):
    texts = [HEAD + "backend z\n" + "\n".join(lines) for lines in (old, new)]
    results = []
    for before in (None, _read(texts[0])):
        try:
            found = parse(texts[1], before)
            results.append((found, list(found.rows), [found.object_at(n) for n in range(40)]))
        except ConfigurationRefused as error:
            results.append(str(error))
    assert results[0] == results[1]


def _read(text):
    try:
        return parse(text)
    except ConfigurationRefused:
        return None


def test_unchanged_sections_are_the_same_object():
    text = HEAD + "backend b\n" + "\n".join(LINES[:1]) + "\nbackend c\n" + LINES[2]
    first = parse(text)
    again = parse("defaults\n    timeout client 1s\n" + text.partition("\n\n")[2], first)
    for name in ("b", "c"):
        assert again.backends[name].servers is first.backends[name].servers
        assert again.backends[name].number < first.backends[name].number
    assert again.sections[0].lines is not first.sections[0].lines


def test_a_known_line_is_refused_where_a_new_one_would_be():
    first = parse(HEAD)
    with pytest.raises(ConfigurationRefused, match="line 1"):
        parse("    timeout connect 5s\n" + HEAD, first)


def many(backend="b", count=MIN_SERVERS, more=""):
    return f"backend {backend}\n" + "".join(f"    server s{n} 192.0.2.1:{1000 + n}{more}\n" for n in range(count))


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        pytest.param("", "", [], id="no new server"),
        pytest.param("", "    server new 192.0.2.1:1\n", ["new"], id="one new server"),
        pytest.param(
            "    server x 192.0.2.1:1\n", "    server x 192.0.2.1:1 weight 2\n", ["x"], id="one changed server"
        ),
        pytest.param("    server x 192.0.2.1:1\n", "", [], id="one removed server"),
        pytest.param("", "    server s1 192.0.2.1:1\n", "all", id="duplicate name"),
        pytest.param("", "    server new 192.0.2.1:1 track b/s1\n", "all", id="one server tracks another"),
        pytest.param("", "    server new 192.0.2.1:1 cookie s1\n", "all", id="one server with its own options"),
        pytest.param("", "    use-server s1 if TRUE\n", "all", id="a rule names a server"),
        pytest.param("    server-template s 3 x:80\n", "    server-template s 3 x:80\n", "all", id="server-template"),
        pytest.param("", "    acl up srv_is_up(b/s1)\n", "all", id="a rule tests a server"),
    ],
)
def test_known_servers_are_not_parsed_again(old, new, kept):
    before = parse(HEAD + many() + old)
    text = HEAD + many() + new
    wanted = parse(text, before)
    short = omit_checked_servers(text, wanted, before)
    assert short.count("\n") == text.count("\n"), "each line keeps its number"
    left = [line.split()[1] for line in short.split("\n") if line.strip().startswith("server ")]
    assert left == ([s.name for s in wanted.backends["b"].servers] if kept == "all" else kept)
    others = [
        [line for line in each.split("\n") if line and not line.startswith("    server ")] for each in (text, short)
    ]
    assert others[0] == others[1]


def test_servers_of_another_backend_count_as_new():
    before = parse(HEAD + many("b") + many("c"))
    text = HEAD + many("c") + many("b", more=" weight 2")
    assert omit_checked_servers(text, parse(text, before), before).count("weight 2") == MIN_SERVERS
    assert omit_checked_servers(text, parse(text, before), before).count("server s") == MIN_SERVERS


@pytest.mark.parametrize("keywords", ["track b/s1", "guid s1"])
def test_a_reference_to_another_backend_causes_a_full_parse(keywords):
    before = parse(HEAD + many("b") + many("c"))
    text = HEAD + many("b") + many("c") + f"    server new 192.0.2.1:1 {keywords}\n"
    assert omit_checked_servers(text, parse(text, before), before) == text


def test_a_small_backend_is_parsed_completely():
    text = HEAD + many(count=MIN_SERVERS - 1)
    assert omit_checked_servers(text, parse(text), parse(text)) == text


SERVERS = [
    "    server a 192.0.2.1:80 weight 1",
    "    server b 192.0.2.2:80 ssl verify none crt tls/1/client.pem",
    "    server c 192.0.2.3:80 source 192.0.2.9 interface eth0",
    "    server d 192.0.2.4:80 check",
    "    server d 192.0.2.5:80 cookie d",
    "    http-request lua.run",
    "    balance roundrobin",
]


@given(*[st.lists(st.sampled_from(SERVERS), max_size=6)] * 3)
def test_a_similar_text_has_the_same_refusals_and_files(first, second, third):
    """The parser derives both from the section before. A forbidden line never passes because of an allowed one."""
    known = None
    for lines in (first, second, third):
        text = HEAD + "backend b\n" + "\n".join(lines)
        found, fresh = parse(text, known), parse(text)
        assert [one.refused for one in found.sections] == [one.refused for one in fresh.sections]
        assert found.server_files == fresh.server_files
        assert [(one.by_name, one.related) for one in found.sections] == [
            (one.by_name, one.related) for one in fresh.sections
        ]
        known = found


def test_the_examples_have_refused_lines_and_files():
    fresh = parse(HEAD + "backend b\n" + "\n".join(SERVERS))
    assert fresh.sections[-1].refused
    assert fresh.server_files
    assert not parse(HEAD + "backend b\n" + SERVERS[0]).sections[-1].refused
