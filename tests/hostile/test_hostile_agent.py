# SPDX-License-Identifier: Apache-2.0
"""The agent's parser finds each section that HAProxy finds, and accepts a load balancer's only.

Newer versions of HAProxy print a file after their own tokenizer, which is the reference.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from functools import lru_cache

import corpus
import pytest
from haproxy_versions import NEWER
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hostile_corpus import taken
from texts import anything

from amphora_agent import bundle
from amphora_agent.apply import bundle_check
from amphora_agent.errors import ConfigurationRefused, MalformedBundle
from amphora_agent.haproxy.config_parser import ALLOWED, parse

MACHINES = (
    "global", "listen x", "peers x", "userlist x", "resolvers x", "program x", "cache x", "ring x", "mailers x",
    "http-errors x", "fcgi-app x", "log-forward x", "crt-store x", "traces",
)  # fmt: skip


@lru_cache
def rendered() -> str:
    return "\n".join(each.rendered.text for each in taken()[::3])


def test_every_rendered_text_is_accepted():
    text = rendered()
    found = parse(text)
    bundle_check.refuse_directives(found, ())
    assert len(found.sections) == len(re.findall(r"^(?:defaults|frontend|backend)\b", text, re.MULTILINE))
    assert len(found.servers) == len(re.findall(r"^    server ", text, re.MULTILINE))


def body(text: str) -> bytes:
    """Return a bundle with this text."""
    own = {"format": 1, "amphora_id": str(uuid.UUID(int=1)), "load_balancer_id": str(uuid.UUID(int=2)), "generation": 1}
    limits = dict.fromkeys(("connections", "threads", "drain", "workers"))
    rest = {"files": [], "pings": {}, "limits": limits, "interfaces": [], "allowed": [], "vrrp": None}
    return json.dumps({**own, **rest, "haproxy": text}).encode()


def test_the_bundle_contains_every_text_unchanged():
    assert bundle.parse(body(rendered())).haproxy == rendered()


@given(st.sampled_from(("\0", "\ud800", "\udfff")), st.integers(0, 2999))
def test_the_bundle_refuses_text_that_cannot_be_encoded(bad, place):
    text = rendered()[:3000]
    with pytest.raises(MalformedBundle):
        bundle.parse(body(f"{text[:place]}{bad}{text[place:]}"))


blanks = st.text(alphabet=" \t\r\v\f", max_size=3)


def disguised(head: str) -> st.SearchStrategy[str]:
    """Return spellings of a word that HAProxy may accept."""
    word, _, rest = head.partition(" ")
    at = st.integers(0, len(word) - 1)
    return st.one_of(
        blanks.map(lambda blank: f"{blank}{head}"),
        at.map(lambda i: f"{word[:i]}''{word[i:]} {rest}"),
        at.map(lambda i: f"{word[:i]}\\{word[i:]} {rest}"),
        at.map(lambda i: f"{word[:i]}'{word[i:]}' {rest}"),
        at.map(lambda i: f'  {word[:i]}"{word[i:]}" {rest}'),
        at.map(lambda i: f"{word[:i]}\\x{ord(word[i]):02x}{word[i + 1 :]} {rest}"),
        at.map(lambda i: f'"{word[:i]}${{NOTHING}}{word[i:]}" {rest}'),
    )


@given(
    place=st.integers(0, 10**6),
    line=st.one_of(
        st.sampled_from(MACHINES).flatmap(disguised),
        st.sampled_from((".if true", ".notice x", '"$HOME" x', "stats socket /tmp/x", "frontend amphora:metrics")),
    ),
)
def test_another_section_is_refused_in_every_position(place, line):
    lines = rendered()[:6000].split("\n")[:-1]
    lines.insert(place % len(lines), line)
    with pytest.raises(ConfigurationRefused):
        parse("\n".join(lines))


@lru_cache
def lines() -> tuple[str, ...]:
    """Return plain and disguised section heads, and other lines."""
    heads = st.sampled_from((*MACHINES, "frontend x", "backend x", "defaults", "defaults x"))
    found = dict.fromkeys(text for text in corpus.STRINGS if len(text) < 100)

    @settings(max_examples=max(500, settings.default.max_examples))
    @given(st.one_of(heads.flatmap(disguised), anything, st.tuples(heads, anything).map("".join)))
    def collect(line):
        found[line] = None

    collect()
    # A newline ends a line and NUL ends a text. A line with a leading dot can hide later lines from the comparison.
    readable = (line for line in found if line.isascii() or line.isprintable())
    return tuple(line for line in readable if not {"\n", "\0"} & set(line) and line.lstrip()[:1] != ".")


@pytest.mark.parametrize("version", NEWER, ids=str)
def test_agent_and_haproxy_agree_on_sections(version, tmp_path):
    file = tmp_path / "cfg"
    file.write_bytes("".join(f"{line}\n" for line in lines()).encode())
    run = subprocess.run([version.here().program, "-dC,line", "-f", str(file)], capture_output=True, check=False)
    seen = {}
    for row in run.stdout.decode().split("\n"):
        number, tab, words = row.partition("\t")
        if number.isdecimal() and tab and not words.startswith("\t"):
            seen[int(number)] = words.split(" ")[0]
    assert len(seen) > 100
    wrong = []
    for number, kind in seen.items():
        line = lines()[number - 1]
        try:
            found = parse(f"backend before\n{line}").sections
        except ConfigurationRefused:
            continue
        if kind not in ALLOWED or len(found) != 2 or found[1].kind != kind:
            wrong.append(line)
    assert wrong == []
