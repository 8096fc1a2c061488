# SPDX-License-Identifier: Apache-2.0
"""Configured defaults replace the values that a profile leaves open."""

import pytest

from amphora_driver import config
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
