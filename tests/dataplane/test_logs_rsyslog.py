# SPDX-License-Identifier: Apache-2.0
"""rsyslog reads the messages of an amphora over UDP, TCP and TLS, with all fields.

The input `named` requires a client certificate with the name of the amphorae.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from amphora_lab import CONTROLLER, eventually
from configuration_text import LISTENER
from log_receivers import self_signed
from test_logs import BALANCER, CLIENTS, FORMER, PROJECT, ask, common, logged_listener, use

RSYSLOG = shutil.which("rsyslogd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [pytest.mark.root, pytest.mark.skipif(RSYSLOG is None, reason="rsyslogd is not installed")]
PORTS = {"udp": 5514, "tcp": 5601, "tls": 5614, "named": 5615}
CONFIGURATION = """
global(workDirectory="{place}" defaultNetstreamDriverCAFile="{place}/ca.pem"
       defaultNetstreamDriverCertFile="{place}/server.pem" defaultNetstreamDriverKeyFile="{place}/key.pem")
template(name="fields" type="string"
         string="%inputname%|%pri%|%protocol-version%|%hostname%|%app-name%|%structured-data%|%msg%\\n")
ruleset(name="all") {{ action(type="omfile" file="{place}/lines" template="fields") }}
module(load="imudp")
module(load="imtcp")
input(type="imudp" address="{address}" port="{udp}" ruleset="all" name="udp")
input(type="imtcp" address="{address}" port="{tcp}" ruleset="all" name="tcp")
input(type="imtcp" address="{address}" port="{tls}" ruleset="all" name="tls" streamDriver.name="{driver}"
      streamDriver.mode="1" streamDriver.authMode="anon")
input(type="imtcp" address="{address}" port="{named}" ruleset="all" name="named" streamDriver.name="{driver}"
      streamDriver.mode="1" streamDriver.authMode="x509/name" permittedPeer=["{peer}"])
"""


def tls_driver() -> str | None:
    """Return the TLS driver of rsyslog, which is a separate package."""
    places = [Path(os.environ.get("RSYSLOG_MODDIR", "/usr/lib/rsyslog")), *Path("/usr/lib").glob("*/rsyslog")]
    for name in ("ossl", "gtls"):
        if any((place / f"lmnsd_{name}.so").exists() for place in places):
            return name
    return None


@pytest.fixture
def lines(network, tmp_path):
    """A function that returns the lines that rsyslog has received, and the CA certificate of its TLS input."""
    _, authorities = self_signed(tmp_path)
    pem = (tmp_path / f"collector-{CONTROLLER}.pem").read_text()
    (tmp_path / "server.pem").write_text(authorities)
    (tmp_path / "ca.pem").write_text(authorities + CLIENTS.pem)
    (tmp_path / "key.pem").write_text(pem[: pem.index("-----BEGIN CERTIFICATE")])
    configuration = tmp_path / "rsyslog.conf"
    values = {"place": tmp_path, "address": CONTROLLER, "driver": tls_driver(), "peer": common(FORMER)}
    text = CONFIGURATION.format(**values, **PORTS)
    if tls_driver() is None:
        text = "input(".join(text.split("input(")[:3])
    configuration.write_text(text)
    command = ["ip", "netns", "exec", network.name("ctl"), RSYSLOG, "-n", "-f", str(configuration)]
    with (tmp_path / "rsyslog.log").open("wb") as log:
        started = subprocess.Popen([*command, "-i", str(tmp_path / "pid")], stdout=log, stderr=log)
    file = tmp_path / "lines"
    try:
        eventually((tmp_path / "pid").exists, "rsyslog runs")
        yield lambda: file.read_text().splitlines() if file.exists() else [], authorities
    finally:
        started.terminate()
        started.wait(20)


def test_rsyslog_reads_all_fields(amphora, network, lines):
    read, authorities = lines
    kinds = [kind for kind in PORTS if kind in ("udp", "tcp") or tls_driver() is not None]
    assert amphora.push(1, logged_listener())[0] == 200
    urls = [f"{'tls' if kind == 'named' else kind}://{CONTROLLER}:{PORTS[kind]}" for kind in kinds]
    use(amphora, tenant=urls, authorities=authorities, certificate=FORMER.pem)

    def arrived():
        ask(network, "/through-rsyslog")
        found = {line.partition("|")[0]: line for line in read() if "/through-rsyslog" in line}
        return found if found.keys() == set(kinds) else None

    for line in eventually(arrived, f"lines of {kinds}").values():
        _, priority, version, host, application, data, message = line.split("|", 6)
        assert (priority, version, application) == ("134", "1", "haproxy")
        assert host == f"amphora-{amphora.id[:8]}"
        ids = f'id="{amphora.id}" project="{PROJECT}" loadbalancer="{BALANCER}" listener="{LISTENER}"'
        assert data == f"[amphora@32473 {ids}]"
        assert message.startswith(f"{PROJECT} {BALANCER} {LISTENER} 198.51.100.20 ")
