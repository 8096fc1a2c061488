# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, Pool
from amphora_driver.validation import tls

OLD = "@SECLEVEL=0"
X, Y = "TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"


def listener(**changes) -> Listener:
    values = {"protocol": ListenerProtocol.TERMINATED_HTTPS, "default_tls_container_ref": "r", **changes}
    return Listener(id="l", loadbalancer_id="b", protocol_port=443, **values)


def negotiated(minimum=None, ciphers=None, **changes) -> tls.Negotiation:
    return tls.listener_negotiation(listener(**changes), minimum, ciphers)


@pytest.mark.parametrize(
    ("chosen", "minimum", "low", "high", "gaps"),
    [
        (None, None, "TLSv1.2", "TLSv1.3", ()),
        ((), None, "TLSv1.2", "TLSv1.3", ()),
        (("TLSv1.3", "TLSv1.2"), None, "TLSv1.2", "TLSv1.3", ()),
        (("TLSv1",), None, "TLSv1.0", "TLSv1.0", ()),
        (("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"), None, "TLSv1.0", "TLSv1.3", ()),
        (("TLSv1", "TLSv1.3"), None, "TLSv1.0", "TLSv1.3", ("TLSv1.1", "TLSv1.2")),
        (("TLSv1.3", "TLSv1.1"), None, "TLSv1.1", "TLSv1.3", ("TLSv1.2",)),
        (("TLSv1", "TLSv1.2"), "TLSv1.1", "TLSv1.2", "TLSv1.2", ()),
        (None, "TLSv1.3", "TLSv1.3", "TLSv1.3", ()),
        (("TLSv1.2",), "TLSv1", "TLSv1.2", "TLSv1.2", ()),
    ],
)
def test_tls_versions_are_validated(chosen, minimum, low, high, gaps):
    assert negotiated(minimum, tls_versions=chosen).versions == (low, high, gaps)


@pytest.mark.parametrize(
    ("versions", "text", "older", "suites"),
    [
        (None, None, None, None),
        (None, "", None, None),
        (None, f"CHACHA20:AES:{X}:ARIA:{Y}", "CHACHA20:AES:ARIA", f"{X}:{Y}"),
        (None, f"!aNULL:ECDHE+AES:-SHA:+RC4:@STRENGTH:{Y}", "!aNULL:ECDHE+AES:-SHA:+RC4:@STRENGTH", Y),
        (("TLSv1.2",), f"AES:{X}", "AES", None),
        (("TLSv1.3",), f"AES:{X}", None, X),
        (("TLSv1.3",), None, None, None),
        (None, "AES::CHACHA20:", "AES:CHACHA20", None),
        # Suites of TLS 1.3 only: older versions have no cipher, whatever the list of the library contains.
        (None, X, None, X),
        (None, f"!aNULL:{X}:@STRENGTH", None, X),
        # OpenSSL 3 needs its lowest security level for old versions. A level in the user's list has precedence.
        (("TLSv1",), None, f"DEFAULT:{OLD}", None),
        (("TLSv1.1", "TLSv1.2"), "AES:CHACHA20", f"AES:CHACHA20:{OLD}", None),
        (("TLSv1.1", "TLSv1.2"), "AES:@SECLEVEL=1", "AES:@SECLEVEL=1", None),
    ],
)
def test_ciphers_are_validated(versions, text, older, suites):
    assert negotiated(tls_versions=versions, tls_ciphers=text)[1:] == (older, suites)


def test_ciphers_without_older_ones_leave_only_tls_1_3():
    assert negotiated(tls_ciphers=X).versions == ("TLSv1.3", "TLSv1.3", ())


def test_the_ciphers_of_the_listener_override_the_profile():
    assert negotiated(ciphers="AES", tls_ciphers="CHACHA20").ciphers == "CHACHA20"
    assert negotiated(ciphers="AES").ciphers == "AES"


@pytest.mark.parametrize(
    ("changes", "minimum", "named"),
    [
        ({"tls_versions": ("SSLv3",)}, None, "SSLv3"),
        ({"tls_versions": ("TLSv1.2", "TLSv1.4")}, None, "TLSv1.4"),
        ({"tls_versions": ("TLSv1", "TLSv1.1")}, "TLSv1.2", "TLSv1.2"),
        ({"tls_ciphers": X, "tls_versions": ("TLSv1.2",)}, None, X),
        ({"tls_ciphers": "AES", "tls_versions": ("TLSv1.3",)}, None, "tls_ciphers 'AES'"),
        ({"tls_ciphers": "!aNULL:@STRENGTH"}, None, "!aNULL"),
        ({"tls_ciphers": ":"}, None, "':'"),
        ({"tls_ciphers": "A B"}, None, "'A B'"),
        ({"tls_ciphers": "A\n"}, None, "A"),
        ({"tls_ciphers": "A" * 2049}, None, "AAA"),
    ],
)
def test_invalid_tls_settings_are_refused(changes, minimum, named):
    with pytest.raises(UnsupportedOption) as caught:
        negotiated(minimum, **changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "speaks"),
    [
        ({}, True),
        ({"default_tls_container_ref": None, "sni_container_refs": ("s",)}, True),
        ({"default_tls_container_ref": None, "sni_container_refs": ()}, False),
        ({"protocol": ListenerProtocol.PROMETHEUS}, True),
        ({"protocol": ListenerProtocol.PROMETHEUS, "default_tls_container_ref": None}, False),
        ({"protocol": ListenerProtocol.HTTP}, False),
        ({"protocol": ListenerProtocol.HTTPS}, False),
    ],
)
def test_a_listener_with_a_certificate_terminates_tls(changes, speaks):
    assert tls.terminates(listener(**changes)) is speaks


def test_the_tls_versions_of_a_pool_have_no_gap():
    pool = Pool(id="p", loadbalancer_id="b", protocol=PoolProtocol.HTTP, tls_enabled=True)
    assert tls.pool_negotiation(pool, None, None).versions == ("TLSv1.2", "TLSv1.3", ())
    gap = Pool(
        id="p", loadbalancer_id="b", protocol=PoolProtocol.HTTP, tls_enabled=True, tls_versions=("TLSv1.1", "TLSv1.3")
    )
    with pytest.raises(UnsupportedOption, match=r"also negotiate TLSv1\.2"):
        tls.pool_negotiation(gap, None, None)
