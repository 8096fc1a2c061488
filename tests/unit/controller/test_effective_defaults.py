# SPDX-License-Identifier: Apache-2.0
"""Configured defaults replace the values that a profile leaves open."""

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from dataplane.pki import Authority

from amphora_driver import config
from amphora_driver.certificates.ca import create_authority
from amphora_driver.errors import ConfigurationError
from amphora_driver.model.loadbalancer import LoadBalancer, Profile, Vip
from amphora_driver.reconcile import defaults
from amphora_driver.render.effective_defaults import Defaults

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


@pytest.fixture
def conf(tmp_path):
    def load(text=""):
        path = tmp_path / "amphora-driver.conf"
        path.write_text(text)
        return config.load([str(path)])

    return load


def limits(conf, **profile):
    tree = LoadBalancer(id="lb", project_id="demo", vip=VIP, profile=Profile(**profile))
    found = defaults.with_process_limits(tree, conf).profile
    return found.process_connection_limit, found.process_threads


def test_without_configuration_the_renderers_defaults_apply(conf):
    assert defaults.rendering_defaults(conf()) == Defaults()


def test_every_default_can_be_configured(conf):
    values = {
        "timeout_client_data": 1,
        "timeout_member_connect": 2,
        "timeout_member_data": 3,
        "timeout_tunnel": 4,
        "timeout_http_request": 5,
        "connection_limit": 6,
        "tls_minimum_version": "TLSv1.2",
        "tls_ciphers": "HIGH",
        "connection_logging": True,
        "log_format": "%ci",
    }
    assert set(values) == set(Defaults.__struct_fields__)
    lines = [f"{name} = {value}" for name, value in values.items()]
    assert defaults.rendering_defaults(conf("\n".join(["[amp_haproxy]", *lines]))) == Defaults(**values)


def test_log_targets_have_the_content_of_their_files(conf, tmp_path):
    certificate, key = create_authority("collectors")
    (tmp_path / "ca.pem").write_bytes(b"a comment\n" + key.reveal() + certificate)
    (tmp_path / "token").write_text("Bearer abc\n")
    found = defaults.log_defaults(
        conf(
            "[amp_logs]\nadmin_targets = udp://192.0.2.9:0514, https://[2001:DB8::9]:8443\n"
            f"tenant_targets = tls://192.0.2.9:6514\nca_certificate = {tmp_path}/ca.pem\n"
            f"authorization_file = {tmp_path}/token\nqueue_bytes = 65536\n"
        )
    )
    document = found.to_document()
    assert document == {
        "admin": [
            {"url": "udp://192.0.2.9:514", "authorization": ""},
            {"url": "https://[2001:db8::9]:8443/", "authorization": "Bearer abc"},
        ],
        "tenant": [{"url": "tls://192.0.2.9:6514", "authorization": ""}],
        "authorities": certificate.decode(),
        "queue_bytes": 65536,
        "project_id": "",
        "load_balancer_id": "",
    }
    assert "Bearer" not in repr(found)
    spare = defaults.log_settings(found, None).to_document()
    assert spare == {**document, "tenant": []}, "a warm spare has no flows"


CLIENTS = Authority("log clients")
ONE, TWO = (CLIENTS.issue(name, number=number) for number, name in enumerate(("one", "two"), start=30))


def with_certificate(conf, tmp_path, content):
    (tmp_path / "ca.pem").write_text(CLIENTS.pem)
    (tmp_path / "client.pem").write_text(content)
    targets = "admin_targets = udp://192.0.2.9:514, tcp://192.0.2.9:601, tls://192.0.2.9:6514, https://192.0.2.9:8443/"
    files = f"ca_certificate = {tmp_path}/ca.pem\nclient_certificate = {tmp_path}/client.pem"
    return conf(f"[amp_logs]\n{targets}\n{files}\n")


@pytest.mark.parametrize("content", [ONE.pem, ONE.key_pem + ONE.certificate_pem, f"a comment\n{ONE.pem}"])
def test_encrypted_targets_have_the_client_certificate(conf, tmp_path, content):
    found = defaults.log_defaults(with_certificate(conf, tmp_path, content))
    shown = [one.get("client_certificate") for one in found.to_document()["admin"]]
    assert shown == [None, None, ONE.certificate_pem + ONE.key_pem, ONE.certificate_pem + ONE.key_pem]
    assert "BEGIN PRIVATE" not in repr(found)
    audited = Profile(admin_log_targets=("tls://192.0.2.77:6514",))
    of_flavor = defaults.log_settings(found, LoadBalancer(id="lb", project_id="demo", vip=VIP, profile=audited))
    assert "BEGIN PRIVATE" not in str(of_flavor.to_document()), "targets of flavors get no client certificate"


def encrypted(certificate):
    key = load_pem_private_key(certificate.key_pem.encode(), None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"sesame")).decode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (ONE.certificate_pem, "no certificate with a private key"),
        (ONE.key_pem, "no certificate with a private key"),
        (ONE.certificate_pem + encrypted(ONE), "its key has a passphrase"),
        (ONE.certificate_pem + TWO.key_pem, "not that of the first certificate"),
        ("", "no certificate with a private key"),
        (ONE.pem.replace("A", "\u00c4"), "not ASCII"),
    ],
)
def test_an_unusable_client_certificate_is_reported_without_its_content(conf, tmp_path, content, reason):
    with pytest.raises(ConfigurationError, match=reason) as caught:
        defaults.validate_defaults(with_certificate(conf, tmp_path, content))
    assert "[amp_logs] client_certificate" in str(caught.value)
    lines = [line for line in content.splitlines() if line and not line.startswith("-----")]
    assert not [line for line in lines if line in str(caught.value)]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("admin_targets = relp://192.0.2.9:1", "udp://, tcp://, tls:// or https://"),
        ("admin_targets = udp://logs.example:1", "with an IP address"),
        ("tenant_targets = udp://192.0.2.9:1, udp://192.0.2.9:01", "twice"),
        ("tenant_targets = tls://192.0.2.9:1", "CA certificate"),
        ("tenant_targets = udp://192.0.2.9:1/x", "path"),
        ("ca_certificate = /nonexistent/ca.pem", "ca_certificate"),
        ("ca_certificate = /dev/null", "no CA certificate"),
        ("authorization_file = /nonexistent/token", "authorization_file"),
        ("client_certificate = /nonexistent/client.pem", "client_certificate"),
    ],
)
def test_invalid_log_targets_are_reported_at_start(conf, lines, reason):
    with pytest.raises(ConfigurationError, match=reason):
        defaults.validate_defaults(conf(f"[amp_logs]\n{lines}\n"))


def test_limits_of_a_profile_precede_configured_limits(conf):
    assert limits(conf()) == (None, None)
    some = conf("[amp_haproxy]\nprocess_connection_limit = 500\nprocess_threads = 2\n")
    assert limits(some) == (500, 2)
    assert limits(some, process_connection_limit=7, process_threads=1) == (7, 1)


def test_invalid_defaults_are_reported_at_start(conf):
    defaults.validate_defaults(conf())
    defaults.validate_defaults(conf("[amp_haproxy]\nlog_format = %ci %ST\ntls_ciphers = HIGH:!aNULL\n"))
    for line in ("log_format = %nosuch", "tls_ciphers = no spaces"):
        with pytest.raises(ConfigurationError, match=line.partition(" ")[0]):
            defaults.validate_defaults(conf(f"[amp_haproxy]\n{line}\n"))
