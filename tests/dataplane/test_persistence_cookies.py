# SPDX-License-Identifier: Apache-2.0
"""Session persistence by cookies of the load balancer or of the application."""

from __future__ import annotations

import http.cookies

import pytest
from http_clients import VIPS, Reply, serving, trusting
from peers import MEMBER, MEMBER6, Answer, RecordedRequest
from wanted import id_of, listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root


def terminated(**more):
    return listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert", **more)


def set_cookies(reply: Reply) -> dict[str, http.cookies.Morsel]:
    found = {}
    for value in reply.values("Set-Cookie"):
        parsed = http.cookies.SimpleCookie(value)
        assert len(parsed) == 1
        found.update(parsed)
    return found


def cookie(value: str, name: str = "SRV"):
    return {"headers": [("Cookie", f"{name}={value}")]}


class StickyPool:
    """A pool with persistence by cookie, and its members a to d."""

    def __init__(self, served, kind: str, name: str | None = None, pool_name: str = "pool", watched=None) -> None:
        self.served = served
        self._persistence = (kind, name)
        self._pool = pool_name
        self._watched = watched
        self.peers = {n: served.web(n, (MEMBER, MEMBER6)[place % 2]) for place, n in enumerate("abcd")}

    def push(self, *names: str, changes=None, **listening) -> str:
        members = [member(self.peers[name], **(changes or {}).get(name, {})) for name in names]
        tree = load_balancer(
            listener(80, pool=self._pool, **listening),
            pool(self._pool, *members, persistence=self._persistence, monitor=self._watched),
        )
        return self.served.push(tree).how

    def fetch(self, **more) -> Reply:
        return self.served.client.fetch("/", **more)


# -- cookies of the load balancer ----------------------------------------------------------------------------------


@pytest.mark.feature("pool.session_persistence.HTTP_COOKIE", "pool.session_persistence.cookie_name")
@pytest.mark.parametrize("name", [None, "JSESSIONID", "a.b-c_d!#$%&'*+^`|~9"])
@pytest.mark.parametrize("vip", VIPS)
def test_the_cookie_of_a_client(served, tenant, vip, name):
    """HAProxy sets the cookie once, for the site, HttpOnly, and Secure if the request came over TLS."""
    # A response for caches: HAProxy makes it private, because the cookie belongs to one client.
    fresh = ("ETag", '"1"'), ("Cache-Control", "max-age=60")
    web = served.web(answer=lambda seen: Answer(headers=(("Set-Cookie", "own=1"), *fresh)))
    tree = load_balancer(listener(80), terminated(), pool("pool", member(web), persistence=("HTTP_COOKIE", name)))
    served.push(tree, {"cert": tenant.issue("www.example.com").pem})
    name = name or "SRV"
    for port, tls in ((80, None), (443, trusting(tenant))):
        first = served.client.fetch(port=port, address=vip, tls=tls)
        given = [value for value in first.values("Set-Cookie") if value != "own=1"]
        assert first.values("Set-Cookie").count("own=1") == 1
        assert len(given) == 1
        (said, value), *attributes = (part.strip().partition("=")[::2] for part in given[0].split(";"))
        assert said == name
        assert value
        assert "web" not in value  # the member's name stays hidden
        assert web.address not in value
        wanted = {"path": "/", "httponly": "", "samesite": "Lax"} | ({"secure": ""} if tls else {})
        assert {key.lower(): what for key, what in attributes} == wanted
        assert first.values("Cache-Control") == ["max-age=60", "private"]
        # The member receives all cookies except this one.
        headers = [("Cookie", f"mine=1; {name}={value}; yours=2")]
        again = served.client.fetch(port=port, address=vip, tls=tls, headers=headers)
        assert again.values("Set-Cookie") == ["own=1"]
        assert again.values("Cache-Control") == ["max-age=60"]
        sent = "; ".join(again.seen.values("Cookie"))
        assert [part.strip() for part in sent.split(";")] == ["mine=1", "yours=2"]


@pytest.mark.feature("pool.session_persistence.HTTP_COOKIE", "member.weight")
def test_clients_stay_by_cookie(served):
    """Clients stay while other members are added, removed and drained, and after a reload."""
    kept = StickyPool(served, "HTTP_COOKIE")
    kept.push("a", "b")
    cookies: dict[str, str] = {}
    while set(cookies) != {"a", "b"}:
        reply = kept.fetch()
        cookies[reply.member] = set_cookies(reply)["SRV"].value

    def stay(*names: str) -> None:
        for name in names:
            for vip in VIPS * 2:
                reply = kept.fetch(address=vip, **cookie(cookies[name]))
                assert reply.member == name
                assert set_cookies(reply) == {}

    stay("a", "b")
    assert kept.push("a", "b", "c") == "runtime"
    stay("a", "b")
    while "c" not in cookies:  # a member that was added at run time has a cookie, too
        reply = kept.fetch()
        cookies[reply.member] = set_cookies(reply)["SRV"].value
    stay("a", "b", "c")
    assert kept.push("a", "b", "c", timeout_client_data=49_000) == "reload"
    stay("a", "b", "c")
    assert kept.push("a", "b", "c", changes={"a": {"weight": 0}}, timeout_client_data=49_000) == "runtime"
    stay("a", "b", "c")
    assert {kept.fetch().member for _ in range(6)} == {"b", "c"}
    assert kept.push("b", "c", timeout_client_data=49_000) == "runtime"
    stay("b", "c")
    # The client of a removed member gets another member and its cookie.
    reply = kept.fetch(**cookie(cookies["a"]))
    assert cookies[reply.member] == set_cookies(reply)["SRV"].value
    # A returning member gets its clients again: the cookie names it, without stored state.
    assert kept.push("a", "b") == "reload"
    stay("a", "b")


@pytest.mark.feature("pool.session_persistence.HTTP_COOKIE", "member.admin_state_up")
def test_cookie_of_an_absent_member_is_ignored(served):
    kept = StickyPool(served, "HTTP_COOKIE", pool_name="watched", watched=monitor("TCP"))
    kept.push("a", "b")
    served.until_states("watched", {"a": "UP", "b": "UP"})
    cookies = {}
    while set(cookies) != {"a", "b"}:
        reply = kept.fetch()
        cookies[reply.member] = set_cookies(reply)["SRV"].value
    assert kept.push("a", "b", changes={"a": {"admin_state_up": False}}) == "runtime"
    for _ in range(3):
        reply = kept.fetch(**cookie(cookies["a"]))
        assert (reply.member, set_cookies(reply)["SRV"].value) == ("b", cookies["b"])
    assert kept.push("a", "b") == "runtime"
    assert kept.fetch(**cookie(cookies["a"])).member == "a"
    kept.peers["a"].stop()
    served.until_states("watched", {"a": "DOWN", "b": "UP"})
    reply = kept.fetch(**cookie(cookies["a"]))
    assert (reply.member, set_cookies(reply)["SRV"].value) == ("b", cookies["b"])


@pytest.mark.feature("pool.session_persistence.HTTP_COOKIE")
@pytest.mark.parametrize("value", ["", "forged", "0123456789abcdef", "a" * 4000, '"quoted"', "%00"])
def test_a_forged_cookie_is_replaced(served, value):
    """HAProxy replaces a forged cookie, and the member does not receive it."""
    peers = [served.web(name) for name in "ab"]
    served.push(load_balancer(listener(80), pool("pool", *map(member, peers), persistence=("HTTP_COOKIE", "KEPT"))))
    replies = [served.client.fetch(**cookie(value, "KEPT")) for _ in range(4)]
    assert {reply.member for reply in replies} == {"a", "b"}
    for reply in replies:
        assert set_cookies(reply)["KEPT"].value not in ("", value)
        assert reply.seen.values("Cookie") in ([], [""])


@pytest.mark.feature("pool.session_persistence.HTTP_COOKIE")
def test_a_cookie_is_valid_for_one_pool(served, tenant):
    """The cookie is valid on all listeners of its pool, and not in another pool with the same members."""
    certificate = tenant.issue("member.internal")
    peers = [served.web(name, tls=serving(certificate)) for name in "ab"]
    again = [member(peer, id=id_of("member", f"{peer.name} again")) for peer in peers]
    more = {"persistence": ("HTTP_COOKIE", None), "tls_enabled": True}
    served.push(
        load_balancer(
            listener(80),
            terminated(),
            listener(81, protocol="TCP"),
            listener(82, pool="other"),
            pool("pool", *map(member, peers), **more),
            pool("other", *again, **more),
        ),
        {"cert": certificate.pem},
    )
    reply = served.client.fetch()
    mine = set_cookies(reply)["SRV"].value
    for port, tls in ((80, None), (443, trusting()), (81, None)):
        for _ in range(3):
            stayed = served.client.fetch(port=port, tls=tls, **cookie(mine))
            assert (stayed.member, set_cookies(stayed)) == (reply.member, {})
    assert {served.client.fetch(port=82, **cookie(mine)).member for _ in range(4)} == {"a", "b"}


# -- cookies of the application ------------------------------------------------------------------------------------

LONG = "x" * 200
SPECIAL = "!#$%&'()*+-./09:<=>?@AZ[]^_`az{|}~%3B%2C"


class Sessions:
    """Members that start a session on request."""

    def __init__(self, served, name: str, pool_name: str, watched=None, protocol: str = "HTTP") -> None:
        self.served = served
        self.name = name
        self._pool = pool_name
        self._watched = watched
        self._protocol = protocol
        self.peers = {
            n: served.web(n, (MEMBER, MEMBER6)[place % 2], answer=self._answer, proxied=protocol != "HTTP")
            for place, n in enumerate("abc")
        }

    def _answer(self, seen: RecordedRequest) -> Answer:
        given = [("Set-Cookie", f"{self.name}={value}; Path=/; HttpOnly") for value in seen.values("X-Begin")]
        return Answer(headers=(("Set-Cookie", "other=1"), *given))

    def push(self, *names: str, changes=None, **listening) -> str:
        members = [member(self.peers[name], **(changes or {}).get(name, {})) for name in names]
        persistence = ("APP_COOKIE", self.name)
        tree = load_balancer(
            listener(80, pool=self._pool, **listening),
            pool(self._pool, *members, protocol=self._protocol, persistence=persistence, monitor=self._watched),
        )
        return self.served.push(tree).how

    def begin(self, value: str, **more) -> str:
        return self.served.client.fetch("/", headers=[("X-Begin", value)], **more).member

    def goes_on(self, value: str, **more) -> str:
        return self.served.client.fetch("/", headers=[("Cookie", f"a=b; {self.name}={value}; c=d")], **more).member

    def stays(self, value: str, home: str) -> None:
        for vip in VIPS * 2:
            assert self.goes_on(value, address=vip) == home


@pytest.mark.feature("pool.session_persistence.APP_COOKIE", "pool.session_persistence.cookie_name")
@pytest.mark.parametrize("name", ["JSESSIONID", "a.b-c_d!#$%&'*+^`|~9"])
@pytest.mark.parametrize("protocol", ["HTTP", "PROXYV2"])
def test_sessions_of_the_application(served, name, protocol):
    """Each cookie value has its member, with any length and characters; an unknown value has none."""
    sessions = Sessions(served, name, f"sessions {protocol}", protocol=protocol)
    sessions.push("a", "b", "c")
    values = ["1", "short", SPECIAL, LONG, *(f"{LONG}{end}" for end in "1234567"), "y" * 2000]
    homes = {value: sessions.begin(value) for value in values}
    assert set(homes.values()) == {"a", "b", "c"}
    for value, home in homes.items():
        sessions.stays(value, home)
    # The member receives this cookie, because the member sets it.
    reply = served.client.fetch("/", headers=[("Cookie", f"{name}={SPECIAL}")])
    assert reply.seen.values("Cookie") == [f"{name}={SPECIAL}"]
    assert {sessions.goes_on("unknown") for _ in range(6)} == {"a", "b", "c"}
    assert {sessions.goes_on("x" * 199) for _ in range(6)} == {"a", "b", "c"}
    assert {served.client.fetch("/").member for _ in range(6)} == {"a", "b", "c"}


@pytest.mark.feature("pool.session_persistence.APP_COOKIE", "member.weight", "member.admin_state_up")
def test_sessions_stay(served):
    """Clients stay while other members are added, removed and drained, and after a reload."""
    sessions = Sessions(served, "session", "sessions stay", monitor("TCP"))
    sessions.push("a", "b")
    served.until_states("sessions stay", {"a": "UP", "b": "UP"})
    homes: dict[str, str] = {}
    while set(homes.values()) != {"a", "b"}:
        value = f"{LONG}{len(homes)}"
        homes[value] = sessions.begin(value)

    def stay(*names: str) -> None:
        for value, home in homes.items():
            if home in names:
                sessions.stays(value, home)

    assert sessions.push("a", "b", "c") == "runtime"
    stay("a", "b")
    assert sessions.push("a", "b", "c", timeout_client_data=49_000) == "reload"
    served.until_learned(len(homes))
    stay("a", "b")
    assert sessions.push("a", "b", "c", changes={"a": {"weight": 0}}, timeout_client_data=49_000) == "runtime"
    stay("a", "b")
    assert "a" not in {sessions.begin(f"new {n}") for n in range(4)}
    assert sessions.push("b", "c", timeout_client_data=49_000) == "runtime"
    stay("b")
    gone = next(value for value, home in homes.items() if home == "a")
    assert sessions.goes_on(gone) in ("b", "c")
    changes = {"b": {"admin_state_up": False}}
    assert sessions.push("b", "c", changes=changes, timeout_client_data=49_000) == "runtime"
    assert {sessions.goes_on(value) for value in homes} == {"c"}
