# SPDX-License-Identifier: Apache-2.0
"""What an image is where amphorae are namespaces: the agent's code."""

import os
import sys

import pytest

from amphora_driver.compute.agent_source import AgentSource


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "amphora_agent"
    folder.mkdir()
    (folder / "__init__.py").write_text("VERSION = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return folder


def test_the_same_files_are_the_same_image(package):
    code = AgentSource(sys.executable)
    first = code.digest()
    assert first.startswith("agent-")
    assert code.digest() == first
    assert AgentSource(sys.executable).digest() == first
    os.utime(package / "__init__.py", (1, 1))
    assert code.digest() == first, "contents count, not times"


def test_other_files_are_another_image(package):
    code = AgentSource(sys.executable)
    first = code.digest()
    (package / "__init__.py").write_text("VERSION = 20\n")
    second = code.digest()
    assert second != first
    (package / "more.py").write_text("")
    assert code.digest() not in (first, second)


def test_a_python_that_does_not_say_where_it_is_has_no_image():
    assert AgentSource("/bin/false").digest() is None
