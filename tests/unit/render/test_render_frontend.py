# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest

from amphora_driver.model.enums import ClientAuthentication, ListenerProtocol, PersistenceType, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Profile, SessionPersistence, Vip
from amphora_driver.model.secret_refs import Purpose, ticket_secret_name
from amphora_driver.render.effective_defaults import Defaults
from amphora_driver.render.haproxy import render
from amphora_driver.validation.insert_headers import ABOUT_CERTIFICATE, ABOUT_CONNECTION

VIP = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
VIP6 = Vip(address="2001:db8::5", subnet_id="s", network_id="n", port_id="p")
MEMBER = Member(id="m1", pool_id="p1", address="192.0.2.1", protocol_port=80)
CERTIFICATE = {"default_tls_container_ref": "default"}


def tree(protocol="HTTP", pool="HTTP", pool_options=None, profile=None, vips=(), **changes) -> LoadBalancer:
    """One listener, with a pool by default."""
    pools = ()
    if pool is not None:
        made = Pool(
            id="p1", loadbalancer_id="b", protocol=PoolProtocol(pool), members=(MEMBER,), **(pool_options or {})
        )
        pools = (made,)
        changes.setdefault("default_pool_id", "p1")
    listener = Listener(
        id="l1", loadbalancer_id="b", protocol=ListenerProtocol(protocol), **{"protocol_port": 80, **changes}
    )
    return LoadBalancer(
        id="b",
        project_id="x",
        vip=VIP,
        additional_vips=vips,
        profile=profile or Profile(),
        listeners=(listener,),
        pools=pools,
    )


def terminated(**changes) -> LoadBalancer:
    return tree("TERMINATED_HTTPS", **{**CERTIFICATE, **changes})


def lines(load_balancer: LoadBalancer, section: str = "frontend", **more) -> list[str]:
    rendered = render(load_balancer, **more)
    assert rendered.refused == ()
    for part in rendered.text.split("\n\n"):
        if part.startswith(f"{section} "):
            return [line.strip() for line in part.splitlines()[1:]]
    raise AssertionError(f"no {section}")


def the(lines: list[str], start: str) -> str:
    (line,) = (line for line in lines if line.startswith(start))
    return line


def objections(load_balancer: LoadBalancer) -> str:
    rendered = render(load_balancer)
    assert [error.object_id for error in rendered.refused] == ["l1"]
    assert rendered.text is None
    return str(rendered.refused[0])


# -- protocols and pools ----------------------------------------------------------------------------------------------

FITTING = {
    "TCP": ("HTTP", "HTTPS", "PROXY", "PROXYV2", "TCP"),
    "HTTP": ("HTTP", "PROXY", "PROXYV2"),
    "HTTPS": ("HTTPS", "PROXY", "PROXYV2", "TCP"),
    "TERMINATED_HTTPS": ("HTTP", "PROXY", "PROXYV2"),
}


@pytest.mark.parametrize("protocol", FITTING)
@pytest.mark.parametrize("pool", ["HTTP", "HTTPS", "PROXY", "PROXYV2", "TCP"])
def test_listener_and_pool_protocols_are_combined(protocol, pool):
    whole = tree(protocol, pool, **(CERTIFICATE if protocol == "TERMINATED_HTTPS" else {}))
    if pool not in FITTING[protocol]:
        assert pool in objections(whole)
        return
    reads = protocol in ("HTTP", "TERMINATED_HTTPS")
    assert the(lines(whole), "mode ") == ("mode http" if reads else "mode tcp")
    carried = "http" if reads else "tcp"
    expected = {"HTTP": "http", "TCP": "tcp", "HTTPS": "tcp"}.get(pool, carried)
    assert the(lines(whole, "backend"), "mode ") == f"mode {expected}"
    word = {"PROXY": " send-proxy", "PROXYV2": " send-proxy-v2"}.get(pool, "")
    word += "-ssl-cn" if pool == "PROXYV2" and protocol == "TERMINATED_HTTPS" else ""
    assert the(lines(whole, "backend"), "server ") == f"server m1 192.0.2.1:80 weight 1{word}"


def test_cookie_persistence_needs_http():
    cookies = {"session_persistence": SessionPersistence(type=PersistenceType.HTTP_COOKIE)}
    assert "cookie" in objections(tree("TCP", "PROXY", cookies))
    assert render(tree("HTTP", "PROXY", cookies)).refused == ()
    # In this case HAProxy reads HTTP behind the listener.
    assert render(tree("TCP", "HTTP", cookies)).refused == ()


def test_a_prometheus_listener_serves_metrics_only():
    found = lines(tree("PROMETHEUS", None))
    assert the(found, "http-request") == "http-request deny deny_status 404 unless { method GET } { path / /metrics }"
    assert the(found, "default_backend") == "default_backend amphora:metrics"
    assert render(tree("PROMETHEUS", None)).text.count("backend ") == 0 + 1


def test_prometheus_with_tls():
    found = lines(tree("PROMETHEUS", None, **CERTIFICATE))
    assert the(found, "bind").startswith("bind 198.51.100.5:80 ssl crt-list tls/l1/certificates.list ")


# -- limits and time-outs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "profile", "defaults", "expected"),
    [
        (-1, None, None, None),
        (7, None, None, 7),
        (-1, 8, None, 8),
        (-1, None, 9, 9),
        (7, 8, 9, 7),
        (-1, 8, 9, 8),
    ],
)
def test_the_connection_limit_is_rendered(own, profile, defaults, expected):
    whole = tree(connection_limit=own, profile=Profile(connection_limit=profile))
    found = lines(whole, defaults=Defaults(connection_limit=defaults))
    assert [line for line in found if line.startswith("maxconn")] == ([f"maxconn {expected}"] if expected else [])


TIMES = {
    "timeout_client_data": ("frontend", "timeout client", 50_000),
    "timeout_member_connect": ("backend", "timeout connect", 5_000),
    "timeout_member_data": ("backend", "timeout server", 50_000),
}


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize(
    ("own", "profile", "defaults", "expected"),
    [(None, None, None, None), (0, None, None, None), (1, 2, 3, 1), (None, 2, 3, 2), (0, 2, 3, 2), (None, None, 3, 3)],
)
def test_timeouts_are_rendered(name, own, profile, defaults, expected):
    section, start, usual = TIMES[name]
    whole = tree(profile=Profile(**{name: profile}), **{name: own})
    found = lines(whole, section, defaults=Defaults(**({name: defaults} if defaults else {})))
    assert the(found, start) == f"{start} {expected or usual}ms"


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize(
    ("own", "minimum", "maximum", "expected"),
    [
        (50_000, 600_000, None, 600_000),
        (50_000, None, 1_000, 1_000),
        (50_000, 40_000, 60_000, 50_000),
        (50_000, 60_000, 60_000, 60_000),
        (None, 60_000, None, 60_000),
        (0, None, 1_000, 1_000),
    ],
)
def test_a_profile_limits_the_timeouts_of_users(name, own, minimum, maximum, expected):
    section, start, _ = TIMES[name]
    profile = Profile(**{f"{name}_minimum": minimum, f"{name}_maximum": maximum})
    found = lines(tree(profile=profile, **{name: own}), section)
    assert the(found, start) == f"{start} {expected}ms"
    others = {start for other, (_, start, _) in TIMES.items() if other != name}
    unlimited = {line for start in others for line in found if line.startswith(start)}
    assert all(line in lines(tree(**{name: own}), section) for line in unlimited), "the limit is for one time-out"


@pytest.mark.parametrize(
    ("protocol", "pool", "profile", "expected"),
    [
        ("HTTP", "HTTP", None, "timeout tunnel 3600000ms"),
        ("HTTP", "HTTP", 5, "timeout tunnel 5ms"),
        ("TCP", "TCP", None, None),
        ("TCP", "TCP", 5, "timeout tunnel 5ms"),
        ("HTTP", "PROXY", None, "timeout tunnel 3600000ms"),
    ],
)
def test_the_tunnel_timeout_is_rendered(protocol, pool, profile, expected):
    found = lines(tree(protocol, pool, profile=Profile(timeout_tunnel=profile)), "backend")
    assert [line for line in found if line.startswith("timeout tunnel")] == ([expected] if expected else [])


def test_the_request_timeout_is_rendered():
    assert the(lines(tree()), "timeout http-request") == "timeout http-request 10000ms"
    quick = tree(profile=Profile(timeout_http_request=5))
    assert the(lines(quick), "timeout http-request") == "timeout http-request 5ms"


# -- permitted sources------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["HTTP", "TCP", "HTTPS", "PROMETHEUS"])
def test_allowed_cidrs_are_not_in_the_haproxy_configuration(protocol):
    """The firewall has them, so a change needs no reload (controller.bundle)."""
    networks = ("192.0.2.9/24", "2001:DB8::1/32", "198.51.100.1", "192.0.2.9/24")
    assert lines(tree(protocol, None, allowed_cidrs=networks)) == lines(tree(protocol, None))


# -- headers ----------------------------------------------------------------------------------------------------------


def test_every_header_is_rendered():
    found = lines(terminated(insert_headers=ABOUT_CONNECTION + ABOUT_CERTIFICATE))
    set_to = {line.split()[2]: line.split()[3] for line in found if line.startswith("http-request set-header")}
    assert set_to == {
        "X-Forwarded-Port": "'%[dst_port]'",
        "X-Forwarded-Proto": "'https'",
        "X-Forwarded-IP": "'%[src]'",
        "X-Client-IP": "'%[src]'",
        "X-Real-IP": "'%[src]'",
        "X-SSL-Client-Verify": "'%[ssl_c_verify]'",
        "X-SSL-Client-Has-Cert": "'%[ssl_c_used]'",
        "X-SSL-Client-DN": "'%[ssl_c_s_dn]'",
        "X-SSL-Client-CN": "'%[ssl_c_s_dn(cn)]'",
        "X-SSL-Issuer": "'%[ssl_c_i_dn]'",
        "X-SSL-Client-SHA1": "'%[ssl_c_sha1,hex]'",
        "X-SSL-Client-Not-Before": "'%[ssl_c_notbefore]'",
        "X-SSL-Client-Not-After": "'%[ssl_c_notafter]'",
    }
    assert "option forwardfor" in found


def test_disabled_headers_are_not_rendered():
    assert not [line for line in lines(tree(insert_headers=())) if "header" in line or "forwardfor" in line]


def test_forwarded_proto_is_rendered_without_tls():
    assert the(lines(tree(insert_headers=("X-Forwarded-Proto",))), "http-request") == (
        "http-request set-header X-Forwarded-Proto 'http'"
    )


@pytest.mark.parametrize(
    ("hsts", "value"),
    [
        ({"hsts_max_age": 0}, "max-age=0;"),
        ({"hsts_max_age": 5, "hsts_include_subdomains": True}, "max-age=5; includeSubDomains;"),
        ({"hsts_max_age": 5, "hsts_preload": True}, "max-age=5; preload;"),
        (
            {"hsts_max_age": 5, "hsts_preload": True, "hsts_include_subdomains": True},
            "max-age=5; includeSubDomains; preload;",
        ),
    ],
)
def test_hsts_is_rendered(hsts, value):
    # http-after-response also covers the responses of HAProxy itself.
    line = f"http-after-response set-header Strict-Transport-Security '{value}'"
    assert the(lines(terminated(**hsts)), "http-after-response") == line


# -- TLS --------------------------------------------------------------------------------------------------------------


def bind(**changes) -> str:
    return the(lines(terminated(**changes)), "bind").removeprefix("bind 198.51.100.5:80 ")


def test_a_certificate_is_rendered():
    assert bind() == "ssl crt-list tls/l1/certificates.list ssl-min-ver TLSv1.2 ssl-max-ver TLSv1.3"
    listed, certificate = render(terminated()).files
    assert (listed.name, listed.content) == ("tls/l1/certificates.list", "tls/l1/default.pem\n")
    assert (certificate.name, certificate.content) == ("tls/l1/default.pem", None)
    assert certificate.secret == type(certificate.secret)("l1", Purpose.CERTIFICATE, "default")


def test_the_default_certificate_is_first_and_sni_keeps_the_order():
    rendered = render(terminated(sni_container_refs=("b", "a", "default", "b")))
    listed, *certificates = rendered.files
    assert [file.secret.ref for file in certificates] == ["default", "b", "a"]
    assert listed.content.splitlines() == [file.name for file in certificates]


def test_sni_certificates_alone_enable_tls():
    rendered = render(terminated(default_tls_container_ref=None, sni_container_refs=("b", "a")))
    listed, *certificates = rendered.files
    assert [file.secret.ref for file in certificates] == ["b", "a"]
    assert listed.content.splitlines() == [file.name for file in certificates]
    assert "bind 198.51.100.5:80 ssl crt-list " in rendered.text


def test_the_first_certificate_always_has_the_same_name():
    """HAProxy can replace the file over its socket but cannot rename it."""
    for default, names in (("a", ()), ("a", ("b",)), (None, ("a", "b")), ("a", ("a", "b"))):
        rendered = render(terminated(default_tls_container_ref=default, sni_container_refs=names))
        first = rendered.files[1]
        assert (first.name, first.secret.ref) == ("tls/l1/default.pem", "a")
        assert [file.secret.ref for file in rendered.files[2:]] == [name for name in names if name != "a"]


def test_ticket_keys_belong_to_the_load_balancer():
    whole = terminated(default_tls_container_ref="default")
    rendered = render(whole, shared_tickets=True)
    (keys,) = (file for file in rendered.files if file.secret and file.secret.purpose is Purpose.TICKETS)
    assert (keys.name, keys.secret) == (f"tls/{whole.id}/ticket.keys", ticket_secret_name(whole.id))
    assert f" tls-ticket-keys {keys.name} " in rendered.text
    assert "ticket" not in render(whole).text
    asking = terminated(
        default_tls_container_ref="default",
        client_authentication=ClientAuthentication.OPTIONAL,
        client_ca_tls_container_ref="ca",
    )
    assert "tls-ticket-keys" not in render(asking, shared_tickets=True).text


def test_every_vip_has_tls():
    found = [line for line in lines(terminated(vips=(VIP6,))) if line.startswith("bind")]
    assert [line.split()[:3] for line in found] == [
        ["bind", "198.51.100.5:80", "ssl"],
        ["bind", "[2001:db8::5]:80", "ssl"],
    ]


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        (None, ""),
        (ClientAuthentication.NONE, ""),
        (ClientAuthentication.OPTIONAL, "ca-file tls/l1/client_ca.pem verify optional no-tls-tickets"),
        (ClientAuthentication.MANDATORY, "ca-file tls/l1/client_ca.pem verify required no-tls-tickets"),
    ],
)
@pytest.mark.parametrize("revokes", [False, True])
def test_client_certificates_are_rendered(asks, words, revokes):
    more = {"client_crl_container_ref": "crl"} if revokes else {}
    whole = terminated(client_authentication=asks, client_ca_tls_container_ref="ca", **more)
    said = the(lines(whole), "bind").removeprefix("bind 198.51.100.5:80 ssl crt-list tls/l1/certificates.list ")
    expected = f"{words} " if words else ""
    expected += "crl-file tls/l1/client_crl.pem " if words and revokes else ""
    assert said == f"{expected}ssl-min-ver TLSv1.2 ssl-max-ver TLSv1.3"
    named = {
        file.name for file in render(whole).files if file.secret and file.secret.purpose is not Purpose.CERTIFICATE
    }
    assert named == {word for word in said.split() if word.startswith("tls/l1/client")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tls_ciphers": "CHACHA20:AES:!ARIA:TLS_AES_128_CCM_SHA256:TLS_AES_256_GCM_SHA384"},
            "ciphers CHACHA20:AES:!ARIA ciphersuites TLS_AES_128_CCM_SHA256:TLS_AES_256_GCM_SHA384",
        ),
        ({"alpn_protocols": ("http/1.1", "h2")}, "alpn http/1.1,h2"),
        ({"alpn_protocols": ()}, "ssl-max-ver TLSv1.3"),
        ({"tls_versions": ("TLSv1",)}, "ssl-min-ver TLSv1.0 ssl-max-ver TLSv1.0 ciphers DEFAULT:@SECLEVEL=0"),
    ],
)
def test_alpn_protocols_are_rendered(changes, words):
    assert bind(**changes).endswith(words)


def test_a_disabled_tls_version_ends_after_the_handshake():
    found = lines(terminated(tls_versions=("TLSv1", "TLSv1.3")))
    assert [line for line in found if line.startswith("tcp-request")] == [
        "tcp-request session reject if { ssl_fc_protocol TLSv1.1 }",
        "tcp-request session reject if { ssl_fc_protocol TLSv1.2 }",
    ]


def test_the_profile_limits_versions_and_sets_ciphers():
    profile = Profile(tls_minimum_version="TLSv1.3", tls_ciphers="TLS_AES_256_GCM_SHA384")
    assert bind(profile=profile).endswith("ssl-min-ver TLSv1.3 ssl-max-ver TLSv1.3 ciphersuites TLS_AES_256_GCM_SHA384")
    assert "TLSv1.3" in objections(terminated(profile=profile, tls_versions=("TLSv1.2",)))


def test_two_listeners_share_no_file():
    whole = terminated(client_authentication=ClientAuthentication.MANDATORY, client_ca_tls_container_ref="ca")
    (listener,) = whole.listeners
    other = msgspec.structs.replace(listener, id="l2", protocol_port=444)
    rendered = render(msgspec.structs.replace(whole, listeners=(listener, other)))
    names = [file.name for file in rendered.files]
    assert len(names) == len(set(names)) == 6
    for section in rendered.text.split("\n\n"):
        if section.startswith("frontend"):
            owner = section.split()[1]
            assert {word.split("/")[1] for word in section.split() if word.startswith("tls/")} == {owner}


def test_a_listener_that_is_not_served_lists_no_files():
    whole = terminated(admin_state_up=False)
    assert render(whole).files == ()


# -- the log ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "defaults", "logs"),
    [(None, False, False), (None, True, True), (False, True, False), (True, False, True)],
)
def test_logged_listeners(profile, defaults, logs):
    found = lines(tree(profile=Profile(connection_logging=profile)), defaults=Defaults(connection_logging=defaults))
    assert ("log stdout format raw local0 info" in found) is logs
    frontend = found[: next((number for number, line in enumerate(found) if line.startswith("backend ")), None)]
    assert ("log global" in frontend) is logs
    assert any(line.startswith("log-format") for line in found) is logs


USUAL = "x b %f %ci %cp %t %{+Q}r %ST %B %U %[ssl_c_verify] %{+Q}[ssl_c_s_dn] %b %s %Tt %tsc"
CONNECTION = "x b %f %ci %cp %t - - %B %U %[ssl_c_verify] %{+Q}[ssl_c_s_dn] %b %s %Tt %ts"


@pytest.mark.parametrize(
    ("protocol", "wanted", "said"),
    [
        ("HTTP", None, USUAL),
        ("TCP", None, CONNECTION),
        ("HTTP", "%%r {{lb_id}}{{ project_id }}", "%f %%r bx"),
        ("TCP", "%%r %r %rc %rt %Tr %{+Q,+X}HM %tr %trg %T %{+E}tsc", "%f %%r - %rc %rt - - - - %T %{+E}ts"),
    ],
)
def test_the_log_format(protocol, wanted, said):
    profile = Profile(connection_logging=True, log_format=wanted)
    whole = tree(protocol, "HTTP" if protocol == "HTTP" else "TCP", profile=profile)
    assert the(lines(whole), "log-format") == f"log-format '{said}'"
