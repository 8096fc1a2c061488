# SPDX-License-Identifier: Apache-2.0
"""The other engine of UDP and SCTP listeners, in a guest: the machine beside may have no IPVS."""

import base64
import json
import re
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.extended,
    pytest.mark.quiet,
    pytest.mark.everything,
    pytest.mark.lasts(2400),
]
HERE = Path(__file__).parent
PROGRAM = ("guest_lvs.py", "guest_lvs_lab.py")
_WRITE = "import base64, pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(base64.b64decode(sys.argv[2]))"


@pytest.fixture
def checks(second):
    """The names of what is checked there, all but what is only measured."""
    second.run("mkdir", "-p", "/run/lvs")
    for name in PROGRAM:
        content = base64.b64encode((HERE / name).read_bytes()).decode()
        second.run("python3", "-c", _WRITE, f"/run/lvs/{name}", content)
    yield re.findall(r"^def check_(\w+)", (HERE / PROGRAM[0]).read_text(), re.MULTILINE)
    second.run("rm", "-r", "/run/lvs")


def test_ipvs_does_what_is_promised_of_it(second, checks, record_property):
    agent = second.shell("echo /opt/amphora-agent/lib/python3*/site-packages").strip()
    wanted = [name for name in checks if name != "cost"]
    said = second.run("python3", "/run/lvs/guest_lvs.py", agent, *wanted, seconds=2000, check=False)
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"check"')]
    assert [one["check"] for one in found if one["ok"]] == wanted, said[-8000:]
    record_property("IPVS in a guest, seconds", round(sum(one["took"] for one in found)))
