# SPDX-License-Identifier: Apache-2.0
"""The image tag of the namespace backend: a digest of the agent's source code."""

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


def test_equal_files_give_an_equal_image(package):
    code = AgentSource(sys.executable)
    first = code.digest()
    assert first.startswith("agent-")
    assert code.digest() == first
    assert AgentSource(sys.executable).digest() == first
    os.utime(package / "__init__.py", (1, 1))
    assert code.digest() == first, "contents count, times do not"


def test_different_files_give_a_different_image(package):
    code = AgentSource(sys.executable)
    first = code.digest()
    (package / "__init__.py").write_text("VERSION = 20\n")
    second = code.digest()
    assert second != first
    (package / "more.py").write_text("")
    third = code.digest()
    assert third not in (first, second)
    (package / "templates").mkdir()
    (package / "templates/haproxy.cfg.j2").write_text("global\n")
    fourth = code.digest()
    assert fourth not in (first, second, third)
    (package / "more.pyc").write_bytes(b"compiled")
    assert code.digest() == fourth


def test_a_python_without_a_known_path_has_no_image():
    assert AgentSource("/bin/false").digest() is None
