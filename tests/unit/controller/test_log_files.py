# SPDX-License-Identifier: Apache-2.0
"""Files of log targets that a controller cannot read for some time."""

import ctypes
import logging
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from dataplane.pki import Authority

from amphora_driver import config
from amphora_driver.maintenance.settings_update import LogFiles

UNPRIVILEGED = 65534
FORMER, NEW = Authority("former").pem, Authority("new").pem


@pytest.fixture
def authorities():
    """A file that its owner only can read, in a directory that all users can enter."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        file = Path(directory, "ca.pem")
        file.touch(0o600)
        yield file


@pytest.fixture
def files(tmp_path, authorities):
    authorities.write_text(FORMER)
    file = tmp_path / "driver.conf"
    file.write_text(f"[amp_logs]\nadmin_targets = tls://192.0.2.9:6514\nca_certificate = {authorities}\n")
    return LogFiles(config.load([str(file)]))


@contextmanager
def without_rights():
    """Make each attempt of this thread to open the file fail with EACCES (setfsuid(2) changes one thread only)."""
    library = ctypes.CDLL(None)
    library.setfsuid(UNPRIVILEGED)
    try:
        yield
    finally:
        library.setfsuid(0)


@pytest.mark.root
def test_a_failed_read_is_repeated_without_a_change_of_the_file(files, authorities, caplog):
    caplog.set_level(logging.WARNING)
    authorities.write_text(NEW)
    with without_rights():
        changed = [files.refresh() for _ in range(3)]
    assert changed == [False] * 3
    assert files.settings.authorities == FORMER
    assert caplog.text.count("Permission denied") == 1, "the same failure is logged once"
    assert files.refresh()
    assert files.settings.authorities == NEW
    assert not files.refresh()


def test_a_failure_that_returns_is_logged_again(files, authorities, caplog):
    for number in (1, 2):
        authorities.write_text("no certificate")
        assert not files.refresh()
        assert not files.refresh()
        assert caplog.text.count("cannot use the files of [amp_logs] and keeps their former content") == number
        authorities.write_text(FORMER)
        assert not files.refresh(), "the content is the former one"
