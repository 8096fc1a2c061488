# SPDX-License-Identifier: Apache-2.0
"""Service supervisors: refusals and errors."""

from __future__ import annotations

import pytest

from amphora_agent.errors import ServiceError, SettingsError
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services.connect import connect_service_manager


def test_an_unknown_service_manager_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="supports systemd and supervisor only"):
        connect_service_manager("runit", Paths(tmp_path))


def test_a_supervisor_that_does_not_answer_is_an_error(tmp_path):
    services = connect_service_manager("supervisor", Paths(tmp_path))
    with pytest.raises(ServiceError, match="does not answer"):
        services.status("haproxy")


def test_a_file_is_replaced_atomically(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, "one")
    write_atomically(file, "two")
    assert file.read_text() == "two"
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "nowhere" / "file", "three")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
