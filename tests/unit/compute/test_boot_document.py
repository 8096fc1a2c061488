# SPDX-License-Identifier: Apache-2.0
"""The boot files in Nova's user data, from the controller to the reader in the image."""

import base64
import json
import os

import pytest

from amphora_agent import config_drive
from amphora_driver.compute.config_drive import USER_DATA_LIMIT, build_user_data
from amphora_driver.errors import ComputeError

FILES = {
    "agent.conf": b"[agent]\nbind_address = 2001:db8::7\n",
    "server.pem": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    "heartbeat.key": b"00ff" * 16,
    "odd.txt": 'tab\t"quoted" \\ é \u2028 \x00 end'.encode(),
}


def drive(root, user_data, meta=b"{}"):
    latest = root / "openstack/latest"
    latest.mkdir(parents=True)
    (latest / "meta_data.json").write_bytes(meta)
    (latest / "user_data").write_bytes(user_data)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return config_drive.read(descriptor)
    finally:
        os.close(descriptor)


def test_the_reader_finds_what_the_controller_sent(tmp_path):
    found = drive(tmp_path, base64.b64decode(build_user_data(FILES, "boot").reveal()))
    assert (found.files, found.skipped, found.other_user_data) == (FILES, (), False)


def test_an_address_is_bound_and_files_are_private(tmp_path):
    told = drive(tmp_path / "drive", base64.b64decode(build_user_data(FILES, "boot").reveal()))
    places = config_drive.Places(tmp_path / "root")
    config_drive.write_files(places, told)
    assert {one.name: one.read_bytes() for one in places.files.iterdir()} == FILES
    assert {one.stat().st_mode & 0o777 for one in places.files.iterdir()} == {0o600}


def test_the_document_is_a_secret():
    assert str(build_user_data(FILES, "boot")) == "***"
    assert set(json.loads(base64.b64decode(build_user_data(FILES, "boot").reveal()))) == {config_drive.USER_DATA_KEY}


def length_of(size):
    return len(build_user_data({"a": b"x" * size}, "boot").reveal())


def test_the_limit_of_nova_is_exact():
    # Base64 has four characters for three bytes, so 65532 is the largest length.
    most = USER_DATA_LIMIT // 4 * 3 - len('{"amphora_files":{"a":""}}')
    assert length_of(most) == 65532
    with pytest.raises(ComputeError, match="65536 characters") as caught:
        length_of(most + 1)
    assert caught.value.final


def test_a_file_that_is_not_text_is_refused_and_not_quoted():
    with pytest.raises(ComputeError) as caught:
        build_user_data({"server.pem": b"secret \xff"}, "boot")
    assert caught.value.final
    assert "secret" not in f"{caught.value} {caught.value.__cause__}"
