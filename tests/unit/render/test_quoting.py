# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jinja2
import pytest

from amphora_driver.errors import QuotingError
from amphora_driver.render import quoting


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("plain", "'plain'"),
        ("two words", "'two words'"),
        ("it's", "'it'\\''s'"),
        ("''", "''\\'''\\'''"),
        ('"$HOME"', "'\"$HOME\"'"),
        ("a#b\\c", "'a#b\\c'"),
        ("%[src]", "'%[src]'"),
        ("ünïcode", "'ünïcode'"),
        ("-f", "'-f'"),
        ("x" * 2048, "'" + "x" * 2048 + "'"),
    ],
)
def test_text_is_quoted(value, word):
    assert quoting.text(value, "it") == word


@pytest.mark.parametrize(
    "value",
    ["", "a\nb", "a\rb", "a\0b", "a\tb", "\x7f", "\x85", "\u2028", "\ud800", "x" * 2049, "ü" * 1025, None, 5, b"x"],
    ids=repr,
)
def test_unprintable_text_is_refused(value):
    with pytest.raises(QuotingError) as caught:
        quoting.text(value, "the field", "the-id")
    assert "the field" in str(caught.value)
    assert caught.value.object_id == "the-id"


def test_values_that_look_like_flags_are_quoted():
    with pytest.raises(QuotingError, match="flag"):
        quoting.text("-f", "it", flag_position=True)


def test_log_format_doubles_percent():
    assert quoting.log_format("100% %[src] %%", "it") == "'100%% %%[src] %%%%'"


@pytest.mark.parametrize("value", ["a", "0b9d", "52cf5fb1-5a1e-4f0c-93a5-0f6a8b6d8f4d", "a.b_c-d", "x" * 64])
def test_identifiers_are_accepted(value):
    assert quoting.identifier(value, "it") == value


@pytest.mark.parametrize("value", ["", "-a", "a b", "a:b", "a\n", "a'", "é", "x" * 65, None, 7])
def test_unsafe_identifiers_are_refused(value):
    with pytest.raises(QuotingError):
        quoting.identifier(value, "it")


@pytest.mark.parametrize("value", ["", "-a", "a b", "a\n", "a'", "a#", "a$", "a\\", None])
def test_unsafe_tokens_are_refused(value):
    with pytest.raises(QuotingError):
        quoting.token(value, "it")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("198.51.100.5", "198.51.100.5:80"),
        ("2001:DB8:0:0::5", "[2001:db8::5]:80"),
        ("::ffff:192.0.2.1", "[::ffff:c000:201]:80"),
    ],
)
def test_an_endpoint_has_address_and_port(value, word):
    assert quoting.endpoint(value, 80, "it") == word


@pytest.mark.parametrize(
    "value",
    [
        "",
        "host",
        "0.0.0.0",
        "::",
        "1.2.3",
        "1.2.3.4/24",
        "1.2.3.4:80",
        "1.2.3.4 ",
        "1.2.3.4\n",
        "010.1.1.1",
        "fe80::1%eth0",
        "fe80::1%a b\nbackend x",
        "unix@/run/x",
        "\u0661.1.1.1",
        None,
        16909060,
        [],
    ],
    ids=repr,
)
def test_invalid_addresses_are_refused(value):
    with pytest.raises(QuotingError):
        quoting.address(value, "it")


@pytest.mark.parametrize("value", [0, -1, 65536, True, "80", 80.0, None])
def test_invalid_ports_are_refused(value):
    with pytest.raises(QuotingError):
        quoting.port(value, "it")


def test_times_have_a_unit():
    assert quoting.milliseconds(50000, "it") == "50000ms"
    assert quoting.seconds(5, "it") == "5s"
    for make, value in [(quoting.milliseconds, 0), (quoting.milliseconds, 2**31), (quoting.seconds, 2147484)]:
        with pytest.raises(QuotingError):
            make(value, "it")


def test_long_values_are_truncated_in_messages():
    with pytest.raises(QuotingError) as caught:
        quoting.token("'" * 5000, "it")
    assert len(str(caught.value)) < 300


def environment() -> jinja2.Environment:
    return jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=quoting.finalize)


@pytest.mark.parametrize("value", ["plain", 1.0, True, None, ["x"], b"x"], ids=repr)
def test_a_template_refuses_unquoted_values(value):
    with pytest.raises(TypeError, match="unquoted"):
        environment().from_string("{{ value }}").render(value=value)


@pytest.mark.parametrize("expression", ["value ~ 'x'", "value | upper", "value.upper()", "'x'", "value ~ value"])
def test_joined_quoted_values_stay_quoted_once(expression):
    with pytest.raises(TypeError, match="unquoted"):
        environment().from_string("{{ " + expression + " }}").render(value=quoting.token("a", "it"))


def test_a_template_prints_quoted_values_and_integers():
    text = environment().from_string("{{ a }} {{ b }}").render(a=quoting.text("x y", "it"), b=5)
    assert text == "'x y' 5"


def test_quoted_text_cannot_be_constructed_directly():
    with pytest.raises(TypeError):
        quoting.Quoted("evil")
    with pytest.raises(TypeError):
        quoting.backend_name("a", "b")
    with pytest.raises(TypeError):
        quoting.words([quoting.token("a", "it"), "b"])


def test_a_pattern_is_quoted_twice():
    word = quoting.substituted("path", "^\\d\"'$,)#", "i", "it")
    assert word == '\'path,regsub("^\\\\d\\"\'\\\'\'$,)#","","i")\''


def test_a_higher_limit_permits_longer_text():
    assert len(quoting.text("x" * 5000, "it", longest=6000)) == 5002
    with pytest.raises(QuotingError, match="longer than 6000"):
        quoting.text("x" * 6001, "it", longest=6000)


@pytest.mark.parametrize(
    "text", ["acl", "-m beg --", "if { path,field(-1,/) -m sub", "use_backend %[var(txn.pool)]", "}"]
)
def test_keywords_and_flags_are_accepted(text):
    assert quoting.keywords(text) == text


@pytest.mark.parametrize(
    "text", ["", " acl", "acl ", "a  b", "---", "-mm", "{{", "a'b", "%[x y]", "a\nb", "a#b", "$a", "!a"]
)
def test_unknown_keywords_are_refused(text):
    with pytest.raises(QuotingError):
        quoting.keywords(text)


def test_names_are_joined_from_quoted_words_only():
    assert quoting.negated(quoting.identifier("r1", "it")) == "!r1"
    function, backend = quoting.keywords("str"), quoting.backend_name(*map(quoting.keywords, ("p", "l")))
    assert quoting.call(function, backend) == "str(p:l)"
    for make in (lambda: quoting.negated("r1"), lambda: quoting.call(function, "p:l")):
        with pytest.raises(TypeError):
            make()


@pytest.mark.parametrize(
    ("make", "value", "word"),
    [
        (quoting.ciphers, "!aNULL:ECDHE+AES:-A:@SECLEVEL=0", "!aNULL:ECDHE+AES:-A:@SECLEVEL=0"),
        (quoting.host_name, "a_b.example.com", "a_b.example.com"),
    ],
)
def test_ciphers_and_host_names_are_accepted(make, value, word):
    made = make(value, "it")
    assert (type(made), made) == (quoting.Quoted, word)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        *((quoting.ciphers, value) for value in ("", "a b", "a\n", "a'", "a$", "a#", "é", None)),
        *((quoting.host_name, value) for value in ("", "a b", "a)", "a,b", "-a", "a-", "a.b\n", "a'", None)),
    ],
)
def test_invalid_ciphers_and_host_names_are_refused(make, value):
    with pytest.raises(QuotingError):
        make(value, "it")


def test_a_fetch_has_a_quoted_argument():
    assert quoting.call(quoting.keywords("str"), quoting.host_name("a.b", "it")) == "str(a.b)"
    assert quoting.sample("req.cook", "it's $x", ",sha1", "it") == "'req.cook(\"it'\\''s $x\"),sha1'"
    for argument in ('a"b', "a\\b", "a\nb", ""):
        with pytest.raises(QuotingError):
            quoting.sample("req.cook", argument, "", "it")


def test_lines_are_joined():
    one, tail = quoting.keywords("server a"), quoting.keywords("ssl verify none")
    assert quoting.lines([one, one]) == "    server a\n    server a\n"
    assert quoting.lines([one], tail) == "    server a ssl verify none\n"
    assert quoting.lines([], tail) == ""
    for rows, end in ((["server b"], None), ([one], "ssl")):
        with pytest.raises(TypeError):
            quoting.lines(rows, end)


@pytest.mark.parametrize("tail", [None, quoting.keywords("check")])
@pytest.mark.parametrize(
    ("beginning", "ordinary"),
    [
        ("server m 192.0.2.1:80 weight 1", True),
        ("server m 223.255.255.255:65535 weight 256", True),
        ("server m 192.0.2.1:65536 weight 1", False),
        ("server m 192.0.2.1:0 weight 1", False),
        ("server m 192.0.2.1:80 weight 257", False),
        ("server m 192.0.2.1:80 weight True", False),
        ("server m 192.0.2.1:80 weight 1.0", False),
        ("server m 192.0.2.01:80 weight 1", False),
        ("server m 127.0.0.1:80 weight 1", False),
        ("server m 169.254.169.254:80 weight 1", False),
        ("server m 0.0.0.0:80 weight 1", False),
        ("server m 224.0.0.1:80 weight 1", False),
        ("server m [2001:db8::1]:80 weight 1", False),
        ("server m 192.0.2.1:80 weight 1\n", False),
        ("server m 192.0.2.1:80 weight 1\nserver n 192.0.2.1:80 weight 1", False),
        ("server m 192.0.2.1:80 disabled 192.0.2.1:80 weight 1", False),
        ("server -f 192.0.2.1:80 weight 1", False),
    ],
)
def test_plain_servers_are_recognised(beginning, ordinary, tail):
    (line,) = quoting.ordinary_servers([beginning], tail)
    assert line == ((f"{beginning} {tail}" if tail else beginning) if ordinary else None)


def test_words_are_joined_from_quoted_words_only():
    assert quoting.words([quoting.keywords("weight"), 5]) == "weight 5"
    for wrong in ("x", True, None, 1.0):
        with pytest.raises(TypeError):
            quoting.words([wrong])
