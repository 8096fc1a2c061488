# SPDX-License-Identifier: Apache-2.0
"""An amphora in namespaces leaves no files on its host."""

from __future__ import annotations

from pathlib import Path

import pytest
from configuration_text import listener, text

pytestmark = pytest.mark.root


def test_an_amphora_writes_no_file_on_the_host(amphora, host_before):
    assert amphora.push(1, text(listener(["m1"])))[0] == 200
    inside = Path(f"/proc/{amphora.init()}/root")
    assert amphora.id in (inside / "etc/amphora-agent/agent.conf").read_text()
    assert (inside / "var/lib/amphora-agent/haproxy.cfg").samefile(amphora.var / "haproxy.cfg")
    for directory in ("etc", "var/lib", "run"):
        name = f"written-by-{amphora.id}"
        (inside / directory / name).touch()
        assert not (Path("/") / directory / name).exists()
    # The amphora sees the host's own files.
    assert (inside / "etc/passwd").read_bytes() == Path("/etc/passwd").read_bytes()
    assert host_before() == host_before.at_first
    amphora.terminate()
    assert host_before() == host_before.at_first


def test_the_amphora_does_not_see_the_hosts_network_namespaces(amphora):
    names = {place.name for place in Path(f"/proc/{amphora.init()}/root/run/netns").iterdir()}
    assert names == {"amphora-haproxy"}
