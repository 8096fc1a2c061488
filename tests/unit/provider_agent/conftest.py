# SPDX-License-Identifier: Apache-2.0
"""Options and database of a provider agent; each test file sets Octavia's trees and further options."""

import socket
from types import SimpleNamespace

import migrated
import pytest
from octavia_lib.api.drivers import driver_lib

from amphora_driver import config
from amphora_driver.database.engine import Database


class ClosedWhereRefused(socket.socket):
    """A socket that is closed after a refused connection."""

    def connect(self, address):
        try:
            super().connect(address)
        except OSError:
            self.close()
            raise


@pytest.fixture(autouse=True)
def nothing_left_open(monkeypatch):
    """Close sockets that octavia_lib leaves open after a refused connection. Otherwise the garbage collector finds such
    a socket during a later test, which fails with `ResourceWarning: unclosed <socket.socket ...>`.
    """
    monkeypatch.setattr(driver_lib, "socket", SimpleNamespace(**{**vars(socket), "socket": ClosedWhereRefused}))


@pytest.fixture
def more_options():
    """Further lines of `[amp_octavia]`."""
    return ""


@pytest.fixture
def conf(tmp_path, more_options):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\nencryption_key_file = {tmp_path}/keys\n"
        f"[amp_queue]\nsocket_dir = {tmp_path}/bells\n"
        f"[amp_octavia]\nstatus_socket = {tmp_path}/status.sock\nstats_socket = {tmp_path}/stats.sock\n"
        f"get_socket = {tmp_path}/get.sock\n{more_options}\n"
    )
    return config.load([str(path)])


@pytest.fixture
def database(conf):
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection)
    yield database
    database.dispose()
