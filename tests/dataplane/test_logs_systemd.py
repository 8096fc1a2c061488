# SPDX-License-Identifier: Apache-2.0
"""Log lines of an amphora under systemd: journald forwards the administrative lines."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import systemd_lab
from amphora_lab import Network, eventually
from log_receivers import TlsReceiver, UdpReceiver, requiring
from systemd_lab import SystemdAmphora
from test_logs import CLIENTS, FORMER, ask, common, logged_listener, use

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(systemd_lab.missing() is not None, reason=str(systemd_lab.missing())),
]


@pytest.fixture
def place():
    made = Network(f"sl{os.getpid()}")
    yield made
    made.close()


@pytest.fixture
def machine(place, authority, tmp_path):
    place.plug()
    made = SystemdAmphora(place, tmp_path, authority)
    try:
        made.start()
        eventually(made.answers, "the agent answers", 120.0)
        yield made
    finally:
        made.power_off()
        place.unplug()


def test_log_lines_of_units_reach_a_target(machine, place, tmp_path):
    """Flows arrive from HAProxy itself. The log forwarder is not root and has no capability.

    It reads the key of its client certificate within the confinement of its unit.
    """
    context, authorities = requiring(tmp_path, CLIENTS.pem)
    receivers = [place.thread("ctl").run(*one) for one in ((UdpReceiver,), (UdpReceiver,), (TlsReceiver, context))]
    admin, tenant, identified = receivers
    try:
        files = {"authorities": authorities, "certificate": FORMER.pem}
        use(machine, admin=[admin.url], tenant=[tenant.url, identified.url], **files)
        assert machine.push(1, logged_listener())[0] == 200
        ask(place, "/under-systemd")
        assert " haproxy - flow " in tenant.wait_for("/under-systemd")
        assert " haproxy - flow " in identified.wait_for("/under-systemd")
        assert identified.clients == [common(FORMER)]
        assert machine.call("PUT", "/v2/settings", b"{")[0] == 400
        refused = admin.wait_for("A request to the API of the agent failed")
        assert re.match(r"<140>1 \S+ \S+ amphora-agent \d+ - \[amphora@32473 ", refused), refused
        assert not [one for one in admin.messages if "/under-systemd" in one]
        status = Path(f"/proc/{machine.pid('log-forwarder')}/status").read_text()
        assert re.search(r"^CapEff:\s0+$", status, re.MULTILINE)
        assert not re.search(r"^Uid:\s0\s", status, re.MULTILINE)
        use(machine)
        eventually(lambda: machine.pid("log-forwarder") is None, "the log forwarder has ended")
    finally:
        for one in receivers:
            one.close()
