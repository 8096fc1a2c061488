# SPDX-License-Identifier: Apache-2.0
"""Files of log targets that a controller cannot read for some time."""

import logging
import resource
from contextlib import contextmanager

import pytest
from dataplane.pki import Authority

from amphora_driver import config
from amphora_driver.maintenance.settings_update import LogFiles

FORMER, NEW = Authority("former").pem, Authority("new").pem


@pytest.fixture
def authorities(tmp_path):
    return tmp_path / "ca.pem"


@pytest.fixture
def files(tmp_path, authorities):
    authorities.write_text(FORMER)
    file = tmp_path / "driver.conf"
    file.write_text(f"[amp_logs]\nadmin_targets = tls://192.0.2.9:6514\nca_certificate = {authorities}\n")
    return LogFiles(config.load([str(file)]))


@contextmanager
def without_descriptors():
    """Make each attempt to open a file fail with EMFILE."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_failed_read_is_repeated_without_a_change_of_the_file(files, authorities, caplog):
    caplog.set_level(logging.WARNING)
    authorities.write_text(NEW)
    with without_descriptors():
        changed = [files.refresh() for _ in range(3)]
    assert changed == [False] * 3
    assert files.settings.authorities == FORMER
    assert caplog.text.count("Too many open files") == 1, "the same failure is logged once"
    assert files.refresh()
    assert files.settings.authorities == NEW
    assert not files.refresh()


def test_a_failure_that_returns_is_logged_again(files, authorities, caplog):
    for number in (1, 2):
        authorities.write_text("no certificate")
        assert not files.refresh()
        assert not files.refresh()
        assert caplog.text.count("uses the former content of the files of [amp_logs]") == number
        authorities.write_text(FORMER)
        assert not files.refresh(), "the content is the former one"
