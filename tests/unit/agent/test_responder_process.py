# SPDX-License-Identifier: Apache-2.0
"""The responder process: its imports, its version, and its ping targets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import amphora_agent
from amphora_agent import responder
from amphora_agent.haproxy.config_parser import AGENT_PREFIX
from amphora_agent.responder import ping_targets, prometheus
from amphora_agent.stats.haproxy_stats import QUESTION

PACKAGE = Path(amphora_agent.__file__).parent
# Each of these modules costs more than the responder's own code.
HEAVY = {"dataclasses", "inspect", "typing", "logging", "pathlib", "json", "ipaddress", "hashlib", "ssl", "argparse"}
LIST = """import sys
sys.path.insert(0, {place!r})
import amphora_agent.responder.__main__
print("\\n".join(name + " " + (getattr(module, "__file__", None) or "") for name, module in sys.modules.items()))
"""


@pytest.fixture(scope="module")
def modules():
    """The imported modules at start, with their files."""
    command = [sys.executable, "-I", "-S", "-c", LIST.format(place=str(PACKAGE.parent))]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(line.split(" ", 1) for line in said.splitlines())


def test_the_responder_imports_few_standard_modules(modules):
    assert HEAVY.isdisjoint(modules)
    library = Path(sys.modules["os"].__file__).parent
    foreign = {name for name, file in modules.items() if file and not file.startswith((str(library), str(PACKAGE)))}
    assert foreign == set()


def test_the_version_covers_all_source_files(modules):
    own = {file for file in modules.values() if file.startswith(str(PACKAGE))}
    elsewhere = {str(Path(file).relative_to(PACKAGE)) for file in own if "/responder/" not in file}
    assert elsewhere == {*responder.ELSEWHERE, "source_checksum.py"}


def test_a_repeated_request_has_the_same_answer():
    assert prometheus.OWN == AGENT_PREFIX
    assert prometheus.QUESTION == QUESTION


def test_changed_ping_targets_are_reloaded(tmp_path):
    file = tmp_path / "pings"
    read = ping_targets.Targets(str(file))
    assert read() == {}
    write(file, {"one": "192.0.2.1", "two": "2001:db8::1"})
    assert read() == {"one": "192.0.2.1", "two": "2001:db8::1"}
    assert read() is read()
    write(file, {"two": "2001:db8::2"})
    assert read() == {"two": "2001:db8::2"}
    file.unlink()  # after the end of the agent the targets stay
    assert read() == {"two": "2001:db8::2"}


def write(file, pings):
    new = file.with_name("new")
    new.write_text(ping_targets.text_of(pings))
    new.replace(file)
