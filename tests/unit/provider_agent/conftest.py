# SPDX-License-Identifier: Apache-2.0
"""A provider agent's options and database; each file of tests says what Octavia has, and which options differ."""

import migrated
import pytest

from amphora_driver import config
from amphora_driver.store.engine import Database


@pytest.fixture
def more_options():
    """Further lines of `[octavia]`."""
    return ""


@pytest.fixture
def conf(tmp_path, more_options):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[store]\nconnection = sqlite:///{tmp_path}/driver.sqlite\nencryption_key_file = {tmp_path}/keys\n"
        f"[queue]\ndoorbell_dir = {tmp_path}/bells\n"
        f"[octavia]\nstatus_socket = {tmp_path}/status.sock\nstats_socket = {tmp_path}/stats.sock\n"
        f"get_socket = {tmp_path}/get.sock\n{more_options}\n"
    )
    return config.load([str(path)])


@pytest.fixture
def database(conf):
    migrated.write(conf.store.connection)
    database = Database(conf.store.connection)
    yield database
    database.dispose()
