# SPDX-License-Identifier: Apache-2.0
"""A finished image of any architecture, booted by `diskimage/boot`; AMPHORA_IMAGE_FILE names it.

The manifest beside the image names the architecture. On amd64, an arm64 image is emulated and boots by UEFI.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import image
import pytest

from amphora_driver.compute import architecture

FILE = os.environ.get("AMPHORA_IMAGE_FILE")
# Boot time-out in seconds, for an emulated machine on a busy host.
_BOOT_SECONDS = 1500
pytestmark = [
    pytest.mark.root,
    pytest.mark.extended,
    pytest.mark.quiet,
    pytest.mark.lasts(_BOOT_SECONDS + 300),
    pytest.mark.skipif(not FILE, reason="AMPHORA_IMAGE_FILE=FILE runs this"),
]


@pytest.fixture
def booted(tmp_path):
    """Boot the image; return the `curl` command that the agent answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [image.ROOT / "diskimage/boot", FILE, "--port", str(port), "--keep", tmp_path / "kept"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            said = b""
            for line in process.stdout:
                said += line
                if line.startswith(b"Its console"):
                    break
            found = re.search(rb"^\s+(curl .*)$", said, re.MULTILINE)
            assert found, said
            # The console output is not used, but qemu must not wait for a reader.
            with subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL):
                yield shlex.split(found[1].decode())
                process.send_signal(signal.SIGTERM)
        finally:
            process.send_signal(signal.SIGTERM)


def test_the_agent_of_the_image_answers_and_has_its_requirements(booted, record_property):
    time_limit = ["--max-time", "30", "--retry-max-time", str(_BOOT_SECONDS), "--retry", "10000", "--retry-delay", "2"]
    done = subprocess.run(
        [*booted, "--silent", "--fail", "--retry-all-errors", *time_limit],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    said = architecture.image_architecture(Path(FILE))
    record_property(
        f"by hand, {said.name}", f"HAProxy {info['haproxy_version']}, keepalived {info['keepalived_version']}"
    )
    assert info["haproxy_version"]
    assert info["keepalived_version"]
    assert "bundle-1" in info["capabilities"]
