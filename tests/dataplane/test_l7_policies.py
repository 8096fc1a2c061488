# SPDX-License-Identifier: Apache-2.0
"""L7 policies on the wire: matches, actions, and the precedence of policies.

Invariant: one listener serves many cases, each behind its own rule on the header X-Case. A request matches the
policies of one case only.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import pytest
from haproxy_versions import HAProxy
from http_clients import VIPS, Reply, trusting
from pki import named
from wanted import VIP, VIP6, id_of, listener, load_balancer, member, policy, pool, rule

pytestmark = pytest.mark.root

URL = "https://elsewhere.example/"
REDIRECTS = {"redirect_url": URL, "redirect_prefix": "https://moved.example"}


@pytest.fixture
def pcre2():
    """Skip tests of regular expressions without PCRE2, which HAProxy has in every distribution."""
    if not HAProxy("system").pcre2:
        pytest.skip("the first HAProxy in PATH was built without PCRE2")


@dataclass(frozen=True)
class Case:
    """A rule with requests that match, and requests that do not match."""

    kind: str
    compare: str
    value: str
    hits: list[dict]
    misses: list[dict]
    key: str | None = None
    more: dict = field(default_factory=dict)


def at(path: str, host: str = "www.example.com") -> dict:
    return {"path": path, "host": host}


def host(name: str) -> dict:
    return {"path": "/", "host": name}


def said(*fields: tuple[str, str]) -> dict:
    return {"path": "/", "headers": fields}


def header(*values: str, name: str = "X-Key") -> dict:
    return said(*((name, value) for value in values))


def cookie(text: str) -> dict:
    return said(("Cookie", text))


HOSTS = [
    Case("HOST_NAME", "EQUAL_TO", "Api.Example.com",
         [host("api.example.com"), host("API.example.COM:80")], [host("xapi.example.com"), host("api.example.com.uk")]),
    Case("HOST_NAME", "EQUAL_TO", "api.example.com:80", [host("api.example.com:80")], [host("api.example.com")]),
    Case("HOST_NAME", "STARTS_WITH", "api.", [host("API.example.com")], [host("www.api.example.com")]),
    Case("HOST_NAME", "ENDS_WITH", ".example.com", [host("a.example.com"), host("a.EXAMPLE.com:8080")],
         [host("example.com"), host("a.example.org")]),
    Case("HOST_NAME", "CONTAINS", "exam", [host("www.EXAMple.com")], [host("www.test")]),
    Case("HOST_NAME", "REGEX", r"^(www|API)\.example\.com$", [host("www.example.com:81"), host("api.EXAMPLE.com")],
         [host("ftp.example.com"), host("www.example.community")]),
    Case("HOST_NAME", "EQUAL_TO", "[2001:db8::1]", [host("[2001:DB8::1]"), host("[2001:db8::1]:80")],
         [host("[2001:db8::2]")]),
]  # fmt: skip
PATHS = [
    Case("PATH", "EQUAL_TO", "/a", [at("/a"), at("/a?b=c")], [at("/A"), at("/a/"), at("/"), at("/x?/a")]),
    Case("PATH", "STARTS_WITH", "/a/", [at("/a/"), at("/a/b")], [at("/a"), at("/b/a/")]),
    Case("PATH", "ENDS_WITH", "/z", [at("/z"), at("/a/z?q")], [at("/z/"), at("/?/z")]),
    Case("PATH", "CONTAINS", "m'i\"d", [at("/m'i\"d"), at("/x/am'i\"db"), at("/m'i%22d")],
         [at("/mid"), at("/?m'i\"d")]),
    Case("PATH", "REGEX", r"^/(?<one>[a-z]+)-\k<one>\d{2}$", [at("/ab-ab12"), at("/ab-ab12?x")],
         [at("/ab-ac12"), at("/ab-ab123")]),
    Case("PATH", "EQUAL_TO", "/caf\u00e9 #1", [at("/caf%C3%A9%20%231"), at("/caf%c3%a9%20%231")], [at("/cafe%20%231")]),
    Case("PATH", "EQUAL_TO", "/${HOME}/$X", [at("/${HOME}/$X"), at("/$%7BHOME%7D/$X")], [at("/root/$X")]),
    Case("PATH", "EQUAL_TO", "/%[src]%20", [at("/%[src]%20")], [at("/%[src] ".strip())]),
    Case("PATH", "EQUAL_TO", "/a\\b", [at("/a\\b"), at("/a%5Cb"), at("/a%5cb")], [at("/ab")]),
    Case("FILE_TYPE", "EQUAL_TO", "jpg", [at("/a.jpg"), at("/b/.jpg?x=.gif")],
         [at("/ajpg"), at("/a.jpg/b"), at("/a.JPG"), at("/a.jpgx"), at("/a?b=.jpg"), at("/a.b/jpg")]),
    Case("FILE_TYPE", "EQUAL_TO", ".tar.gz", [at("/a.tar.gz")], [at("/a.gz"), at("/atar.gz")]),
    Case("FILE_TYPE", "REGEX", "^jpe?g$|^$", [at("/a.jpg"), at("/a.b/c.jpeg"), at("/a.")], [at("/a.jpgx"), at("/jpg")]),
    Case("FILE_TYPE", "STARTS_WITH", "jp", [at("/a.jpg"), at("/a.jp")], [at("/a.xjp"), at("/jp")]),
    Case("FILE_TYPE", "ENDS_WITH", "ml", [at("/a.html"), at("/a.ml")], [at("/a.htm"), at("/aml")]),
    Case("FILE_TYPE", "CONTAINS", "htm", [at("/a.xhtml")], [at("/htm.a"), at("/htm")]),
]  # fmt: skip
NASTY = (
    "-f",
    "--",
    "-m reg",
    "a b",
    "#a",
    "it's",
    '"q" x',
    "%[src]%",
    "$HOME",
    "${HOME}",
    "\\",
    "\\ b",
    "{a}",
    "&amp;",
)
FIELDS = [
    Case("HEADER", "EQUAL_TO", "b", [header("b"), header("a, b,c"), header("a", "b")],
         [header("ab"), header("B"), header(), said(("X-Other", "b"))], "X-Key"),
    Case("HEADER", "EQUAL_TO", "a, b", [header("a, b")], [header("a"), header("a,b")], "x-KEY"),
    Case("HEADER", "STARTS_WITH", "b", [header("bc"), header("a, bc")], [header("ab")], "X-Key"),
    Case("HEADER", "ENDS_WITH", "b", [header("ab"), header("ab, c")], [header("bc")], "X-Key"),
    Case("HEADER", "CONTAINS", "b, c", [header("a, b, c, d")], [header("b", "c")], "X-Key"),
    Case("HEADER", "REGEX", "^(b|c d)$", [header("b"), header("a, b"), header("a", "c d")], [header("bb")], "X-Key"),
    Case("HEADER", "REGEX", "^$|^e$", [header(""), header("e")], [header("x"), header()], "X-Key"),
    Case("HEADER", "EQUAL_TO", "v", [header("v", name="!#$%&'*+-.^_`|~9")], [header("v", name="!#$%&'*+-.^_`|~8")],
         "!#$%&'*+-.^_`|~9"),
    *(Case("HEADER", compare, value, [header(value)], [header("other")], "X-Key")
      for value in (*NASTY, "\u00e9\u20ac") for compare in ("EQUAL_TO", "STARTS_WITH", "ENDS_WITH", "CONTAINS")),
    *(Case("HEADER", "REGEX", f"^\\Q{value}\\E$", [header(value)], [header("x")], "X-Key")
      for value in NASTY if "\\" not in value),
    Case("COOKIE", "EQUAL_TO", "b", [cookie("k=b"), cookie("a=1; k=b; c=2")],
         [cookie("k=bb"), cookie("K=b"), cookie("a=b"), said()], "k"),
    Case("COOKIE", "STARTS_WITH", "-f", [cookie("k=-fx")], [cookie("k=x-f")], "k"),
    Case("COOKIE", "ENDS_WITH", "'$X", [cookie("k=a'$X")], [cookie("k='$Xa")], "k"),
    Case("COOKIE", "CONTAINS", "${X}", [cookie("k=a${X}b")], [cookie("k=ab")], "k"),
    Case("COOKIE", "REGEX", r"^[0-9a-f]{4}(?!.)", [cookie("k=12ab")], [cookie("k=12abc"), cookie("l=12ab")], "k"),
    Case("COOKIE", "EQUAL_TO", "v", [cookie("a'$%&b=v")], [cookie("ab=v")], "a'$%&b"),
]  # fmt: skip
EVERY = [*HOSTS, *PATHS, *FIELDS]
ACTIONS = ("REJECT", "REDIRECT_TO_POOL")


def served_at_once(cases, port: int = 80, **more):
    """Return a listener with all cases, each with both actions, plain and inverted, numbered in order."""
    numbers = itertools.count(1)
    policies = [
        policy(
            action,
            number := next(numbers),
            rule("HEADER", "EQUAL_TO", str(number), "X-Case"),
            rule(case.kind, case.compare, case.value, case.key, invert=invert),
            to_pool="other" if action == "REDIRECT_TO_POOL" else None,
        )
        for case, action, invert in itertools.product(cases, ACTIONS, (False, True))
    ]
    return listener(port, *policies, **more)


def ask_all(served, cases, **how) -> None:
    wrong = []
    for number, (case, action, invert) in enumerate(itertools.product(cases, ACTIONS, (False, True)), start=1):
        for wanted, true in [*((each, True) for each in case.hits), *((each, False) for each in case.misses)]:
            request = {**wanted, "headers": (("X-Case", str(number)), *wanted.get("headers", ()))}
            found = what(served.client.fetch(**request, **how))
            if found != (expected(action) if true is not invert else "default"):
                wrong.append((case.kind, case.compare, case.value, action, f"{invert=}", request, found))
    assert wrong == []


def what(reply: Reply) -> str:
    """Return the result of a request: the member's name, or status and Location."""
    if reply.status == 200:
        return reply.member
    target = reply.header("Location")
    return str(reply.status) if target is None else f"{reply.status} {target.encode('latin-1').decode()}"


def expected(action: str) -> str:
    return {"REJECT": "403", "REDIRECT_TO_POOL": "other"}[action]


@pytest.fixture
def pools(served):
    default, other = served.web("default"), served.web("other", "198.51.100.102")
    return pool("pool", member(default)), pool("other", member(other))


@pytest.mark.feature(
    "l7rule.type.HOST_NAME",
    "l7rule.type.PATH",
    "l7rule.type.FILE_TYPE",
    "l7rule.type.HEADER",
    "l7rule.type.COOKIE",
    "l7rule.compare_type.REGEX",
    "l7rule.compare_type.STARTS_WITH",
    "l7rule.compare_type.ENDS_WITH",
    "l7rule.compare_type.CONTAINS",
    "l7rule.compare_type.EQUAL_TO",
    "l7rule.invert",
    "l7rule.key",
    "l7rule.value",
)
@pytest.mark.usefixtures("pcre2")
@pytest.mark.parametrize("vip", VIPS)
def test_rules(served, pools, vip):
    served.push(load_balancer(served_at_once(EVERY), *pools))
    ask_all(served, EVERY, address=vip)


@pytest.mark.usefixtures("pcre2")
def test_rules_in_http_2(served, pools, tenant):
    """HTTP/2 has a pseudo-header for the host, names in lower case, and cookies in several fields."""
    cases = [*HOSTS, *PATHS[:5], *FIELDS[:6]]
    tls_listener = served_at_once(
        cases, 443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert", alpn_protocols=("h2",)
    )
    served.push(load_balancer(tls_listener, *pools), {"cert": tenant.issue("www.example.com").pem})
    ask_all(served, cases, port=443, tls=trusting(tenant, alpn=("h2",)))


@pytest.mark.usefixtures("pcre2")
@pytest.mark.feature("l7rule.type.SSL_CONN_HAS_CERT", "l7rule.type.SSL_VERIFY_RESULT", "l7rule.type.SSL_DN_FIELD")
@pytest.mark.parametrize("alpn", ["http/1.1", "h2"])
@pytest.mark.parametrize("vip", VIPS)
def test_rules_about_a_clients_certificate(served, pools, tenant, vip, alpn):
    ada = tenant.issue("ada", subject=named("Ada O'Hara #1", organization_name="Engines, \u00e9"))
    me, anonymous = {"path": "/"}, {"path": "/", "certificate": None}
    cases = [
        Case("SSL_CONN_HAS_CERT", "EQUAL_TO", "True", [me], [anonymous]),
        Case("SSL_VERIFY_RESULT", "EQUAL_TO", "0", [me, anonymous], []),
        Case("SSL_VERIFY_RESULT", "EQUAL_TO", "10", [], [me, anonymous]),
        *(
            Case("SSL_DN_FIELD", compare, value, [me], [anonymous], "CN")
            for compare, value in (
                ("EQUAL_TO", "Ada O'Hara #1"),
                ("STARTS_WITH", "Ada O'"),
                ("ENDS_WITH", " #1"),
                ("CONTAINS", "O'Hara"),
                ("REGEX", "^Ada .*[0-9]$"),
            )
        ),
        Case("SSL_DN_FIELD", "EQUAL_TO", "ada o'hara #1", [], [me, anonymous], "CN"),
        Case("SSL_DN_FIELD", "STARTS_WITH", "Engines, ", [me], [anonymous], "O"),
        Case("SSL_DN_FIELD", "EQUAL_TO", "Engines, \u00e9", [me], [anonymous], "O"),
        Case("SSL_DN_FIELD", "CONTAINS", "a", [], [me, anonymous], "ZZ"),
    ]  # fmt: skip
    tls_listener = served_at_once(
        cases,
        443,
        protocol="TERMINATED_HTTPS",
        default_tls_container_ref="cert",
        client_ca_tls_container_ref="clients",
        client_authentication="OPTIONAL",
        alpn_protocols=("h2", "http/1.1"),
    )
    served.push(
        load_balancer(tls_listener, *pools), {"cert": tenant.issue("www.example.com").pem, "clients": tenant.pem}
    )
    settings = {True: trusting(tenant, certificate=ada, alpn=(alpn,)), False: trusting(tenant, alpn=(alpn,))}
    for shown in (True, False):
        chosen = [
            Case(each.kind, each.compare, each.value,
                 [{"path": "/"} for request in each.hits if ("certificate" not in request) is shown],
                 [{"path": "/"} for request in each.misses if ("certificate" not in request) is shown], each.key)
            for each in cases
        ]  # fmt: skip
        ask_all(served, chosen, port=443, tls=settings[shown], address=vip)


# -- precedence of policies ----------------------------------------------------------------------------------------

OUTCOMES = {
    "REJECT": "403",
    "REDIRECT_TO_URL": f"302 {URL}",
    "REDIRECT_PREFIX": "302 https://moved.example/p?q=1",
    "REDIRECT_TO_POOL": "other",
}


@pytest.mark.feature(
    "l7policy.position",
    "l7policy.action.REJECT",
    "l7policy.action.REDIRECT_TO_URL",
    "l7policy.action.REDIRECT_TO_PREFIX",
    "l7policy.action.REDIRECT_TO_POOL",
    "l7policy.redirect_pool_id",
)
@pytest.mark.parametrize("vip", VIPS)
def test_the_first_matching_policy_of_any_action_applies(served, pools, vip):
    """Covers all orders of the four actions; X-Skip names the policies of a case that do not match."""
    numbers = itertools.count(1)
    orders = list(itertools.permutations(OUTCOMES))
    policies = [
        policy(
            action,
            next(numbers),
            rule("HEADER", "EQUAL_TO", str(case), "X-Case"),
            rule("HEADER", "CONTAINS", str(place), "X-Skip", invert=True),
            **({"to_pool": "other"} if action == "REDIRECT_TO_POOL" else REDIRECTS),
        )
        for case, order in enumerate(orders)
        for place, action in enumerate(order)
    ]
    # The order in the listener differs from the positions.
    served.push(load_balancer(listener(80, *reversed(policies)), *pools))
    for case, order in enumerate(orders):
        for skipped in range(5):
            fields = (("X-Case", str(case)), ("X-Skip", "0123"[:skipped]))
            found = what(served.client.fetch("/p?q=1", headers=fields, address=vip))
            assert found == [*map(OUTCOMES.get, order), "default"][skipped], (order, skipped)


@pytest.mark.parametrize("vip", VIPS)
def test_a_policy_to_a_disabled_pool(served, pools, vip):
    """Neither another policy nor the default pool serves the request."""
    default, other = pools
    off = pool("off", admin_state_up=False)
    path = [rule("PATH", "EQUAL_TO", f"/{n}") for n in range(3)]
    wanted = listener(
        80,
        policy("REDIRECT_TO_POOL", 1, path[0], to_pool="off"),
        policy("REJECT", 2, path[0]),
        policy("REDIRECT_TO_POOL", 3, path[1], to_pool="other"),
        policy("REDIRECT_TO_POOL", 4, path[1], to_pool="off"),
    )
    served.push(load_balancer(wanted, default, other, off))
    assert [what(served.client.fetch(f"/{n}", address=vip)) for n in range(3)] == ["503", "other", "default"]


@pytest.mark.feature("l7policy.admin_state_up", "l7rule.admin_state_up")
def test_disabled_policies_have_no_effect(served, pools):
    never = rule("PATH", "EQUAL_TO", "/never")
    everything = rule("PATH", "STARTS_WITH", "/")
    wanted = listener(
        80,
        policy("REJECT", 1, everything, admin_state_up=False),
        policy("REJECT", 2, rule("PATH", "STARTS_WITH", "/", admin_state_up=False)),
        policy("REJECT", 3),
        policy("REJECT", 4, rule("PATH", "EQUAL_TO", "/off", admin_state_up=False), never),
        policy("REDIRECT_TO_POOL", 5, rule("PATH", "EQUAL_TO", "/on"), to_pool="other"),
    )
    served.push(load_balancer(wanted, *pools))
    found = {path: what(served.client.fetch(path)) for path in ("/", "/off", "/never", "/on")}
    assert found == {"/": "default", "/off": "default", "/never": "403", "/on": "other"}


def test_fifty_rules(served, pools):
    """Each of the fifty rules is necessary for the match."""
    rules = [rule("HEADER", "CONTAINS", f"<{n}>", "X-All", invert=bool(n % 2)) for n in range(50)]
    served.push(load_balancer(listener(80, policy("REDIRECT_TO_POOL", 1, *rules, to_pool="other")), *pools))
    even = [f"<{n}>" for n in range(0, 50, 2)]
    assert what(served.client.fetch(headers=(("X-All", "".join(even)),))) == "other"
    for n in (0, 24, 48):
        less = "".join(each for each in even if each != f"<{n}>")
        assert what(served.client.fetch(headers=(("X-All", less),))) == "default"
    for n in (1, 25, 49):
        assert what(served.client.fetch(headers=(("X-All", "".join([*even, f"<{n}>"])),))) == "default"


# -- redirects -----------------------------------------------------------------------------------------------------

TARGETS = (
    "https://example.com/?a=1&b='2'&c=\"3\"#d",
    "https://example.com/%20%[src]%%{+Q}o",
    "https://example.com/$HOME/${HOME}",
    "https://example.com/a\\b\\n{}|<b>^`~",
    "https://example.com/caf\u00e9/\u20ac",
    "https://example.com/a  b",
    "-f",
    "/relative?x#y",
)


@pytest.mark.feature("l7policy.redirect_url", "l7policy.redirect_http_code")
@pytest.mark.parametrize("vip", VIPS)
def test_a_redirect_url_is_sent_unchanged(served, pools, vip):
    codes = (None, 301, 302, 303, 307, 308)
    cases = list(itertools.product(TARGETS, codes))
    policies = [
        policy(
            "REDIRECT_TO_URL",
            n + 1,
            rule("HEADER", "EQUAL_TO", str(n), "X-Case"),
            redirect_url=target,
            redirect_http_code=code,
        )
        for n, (target, code) in enumerate(cases)
    ]
    served.push(load_balancer(listener(80, *policies), *pools))
    for n, (target, code) in enumerate(cases):
        reply = served.client.fetch("/x?y=z", headers=(("X-Case", str(n)),), address=vip)
        assert what(reply) == f"{code or 302} {target}"


@pytest.mark.feature("l7policy.redirect_prefix")
@pytest.mark.parametrize("vip", VIPS)
def test_a_prefix_is_followed_by_path_and_query(served, pools, vip):
    """One slash is between them, with and without a slash at the end of the prefix."""
    prefixes = {
        "https://example.com": "https://example.com",
        "https://example.com/": "https://example.com",
        "https://example.com/a/": "https://example.com/a",
        "https://example.com/%[src]$X'": "https://example.com/%[src]$X'",
        "https://example.com/\u00e9/?to=": "https://example.com/\u00e9/?to=",
    }
    policies = [
        policy("REDIRECT_PREFIX", n + 1, rule("HEADER", "EQUAL_TO", str(n), "X-Case"), redirect_prefix=prefix)
        for n, prefix in enumerate(prefixes)
    ]
    served.push(load_balancer(listener(80, *policies), *pools))
    for n, beginning in enumerate(prefixes.values()):
        for path in ("/", "/p/a?q=1&r=%20", "/p/?"):
            reply = served.client.fetch(path, headers=(("X-Case", str(n)),), address=vip)
            assert what(reply) == f"302 {beginning}{path}"


# -- expensive regular expressions ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("pcre2")
def test_unfinished_regex_search_grants_no_access(served, pools):
    """The search effort is quadratic. A search above the limit matches REJECT policies only."""
    pattern = "(?:a|b|ab)(?:.|b)*q"
    wanted = [
        policy(
            action,
            n + 1,
            rule("HEADER", "EQUAL_TO", str(n), "X-Case"),
            rule("PATH", "REGEX", pattern, invert=invert),
            to_pool="other" if action == "REDIRECT_TO_POOL" else None,
        )
        for n, (action, invert) in enumerate(itertools.product(ACTIONS, (False, True)))
    ]
    served.push(load_balancer(listener(80, *wanted), *pools))

    def found(path: str) -> list[str]:
        return [what(served.client.fetch(path, headers=(("X-Case", str(n)),))) for n in range(4)]

    assert found("/abq") == ["403", "default", "other", "default"]
    assert found("/xyz") == ["default", "403", "default", "other"]
    begin = time.monotonic()
    assert found("/" + "ab" * 4000) == ["403", "403", "default", "default"]
    assert time.monotonic() - begin < 5


@pytest.mark.usefixtures("pcre2")
def test_an_exponential_pattern_and_its_listener_are_refused(served, pools):
    bad = policy("REJECT", 1, rule("PATH", "REGEX", "^/(a+)+$"))
    good = listener(81, policy("REDIRECT_TO_POOL", 2, rule("PATH", "REGEX", "^/a+$"), to_pool="other"))
    served.push(
        load_balancer(listener(80, bad), good, *pools),
        refused=(bad.rules[0].id, bad.id, id_of("listener", 80)),
    )
    assert what(served.client.fetch("/aaa", port=81)) == "other"
    assert all(served.client.refused(80, vip) for vip in (VIP, VIP6))
