# SPDX-License-Identifier: Apache-2.0
"""Servers for which the sandbox forwards connections out of its namespace."""

import pytest

from sandbox import forward_out
from sandbox.settings import SandboxError


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        (None, ()),
        ("sqlite:////tmp/x.sqlite", ()),
        ("mysql+pymysql://root@localhost/x?unix_socket=/run/x", ()),
        ("postgresql+psycopg://root@/x?host=/run/x", ()),
        ("mysql+pymysql://root@127.0.0.1/x", (3306,)),
        ("postgresql+psycopg://u:p@localhost:5433/x", (5433,)),
        ("amqp://guest:guest@127.0.0.1:5672//;amqp://guest:guest@127.0.0.1:5673//", (5672, 5673)),
    ],
)
def test_connections_to_loopback_are_forwarded(url, ports):
    assert forward_out.loopback_ports(url) == ports


def test_remote_servers_are_refused_without_showing_the_password():
    with pytest.raises(SandboxError) as caught:
        forward_out.loopback_ports("amqp://user:canary@192.0.2.1:5672//")
    assert "192.0.2.1" in str(caught.value)
    assert "canary" not in str(caught.value)
