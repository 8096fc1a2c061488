# SPDX-License-Identifier: Apache-2.0
"""The parser of HAProxy's configuration: sections, lines and words."""

from __future__ import annotations

import pytest

from amphora_agent.errors import ConfigurationRefused
from amphora_agent.haproxy.config_parser import parse, split

TEXT = """defaults
    mode http
frontend lis
    bind 198.51.100.5:80
    default_backend pool:lis

# a comment
backend pool:lis
    balance leastconn
    server m1 192.0.2.1:80 weight 3 check inter 5s
    server m2 [2001:db8::1]:80 disabled  # why not
"""


@pytest.mark.parametrize(
    ("line", "words", "plain"),
    [
        ("  server a 192.0.2.1:80\tcheck # x", ["server", "a", "192.0.2.1:80", "check"], True),
        ("a 'b' \"c\"", ["a", "b", "c"], True),
        ("a 'b;c'", ["a", "b;c"], False),
        ("a 'b\\c'", ["a", "b\\c"], False),
        ('a "$HOME"', ["a", "$HOME"], False),
        ("a '$b'", ["a", "$b"], True),
        ("a <<", ["a", "<<"], False),
        ("a ''", ["a", ""], False),
        ('a "b c" \'d"e\'', ["a", "b c", 'd"e'], False),
        ("a b\\ c", ["a", "b c"], False),
        ('a "b\\"c" ""', ["a", 'b"c', ""], False),
        ("a $HOME", ["a", "$HOME"], False),
        ("a;b", ["a;b"], False),
        ("a é", ["a", "é"], False),
        ("# nothing", [], True),
        ("", [], True),
    ],
)
def test_words_are_split(line, words, plain):
    assert split(line) == (words, plain)


def test_sections_and_servers_are_parsed():
    configuration = parse(TEXT)
    assert [(s.kind, s.name) for s in configuration.sections] == [
        ("defaults", ""),
        ("frontend", "lis"),
        ("backend", "pool:lis"),
    ]
    first, second = (configuration.servers["pool:lis", name] for name in ("m1", "m2"))
    assert (first.address, first.weight, first.checked, first.disabled) == ("192.0.2.1:80", 3, True, False)
    assert (second.address, second.weight, second.checked, second.disabled) == ("[2001:db8::1]:80", 1, False, True)
    assert configuration.backends["pool:lis"].setting("balance") == ("leastconn",)


@pytest.mark.parametrize(
    ("number", "expected"), [(1, None), (2, None), (3, "lis"), (5, "lis"), (9, "pool"), (10, "m1"), (11, "m2")]
)
def test_the_object_of_a_line_is_found(number, expected):
    assert parse(TEXT).object_at(number) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lis", "lis"), ("pool:lis", "pool"), ("pool:lis/m1", "m1"), ("pool:lis/m9", "pool"), ("x", None)],
)
def test_the_object_of_a_name_is_found(name, expected):
    assert parse(TEXT).object_named(name) == expected


@pytest.mark.parametrize(
    "text",
    [
        "global\n    maxconn 5\n",
        "defaults\n    mode http\n  global\n",
        'defaults\n    "global"\n',
        "defaults\n    \\x67lobal\n",
        "defaults\n    'glo'bal\n",
        "defaults\n\r\vglobal\n",
        'defaults\n    "${SECTION}"\n',
        "defaults\n    .if 1\n",
        "peers p\n",
        "listen l\n",
        "program p\n    command /bin/sh\n",
        "userlist u\n",
        "ring r\n",
        "resolvers r\n",
        "http-errors e\n",
        "something\n",
        "    mode http\n",
        "frontend\n    bind :80\n",
        "frontend a\nfrontend a\n",
        "backend a\nmode http\n",
        "backend amphora:metrics\n",
        "frontend 'amphora:certificates'\n",
    ],
)
def test_sections_of_the_amphora_are_refused(text):
    with pytest.raises(ConfigurationRefused, match="line "):
        parse(text)
