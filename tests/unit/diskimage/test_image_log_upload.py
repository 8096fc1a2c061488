# SPDX-License-Identifier: Apache-2.0
"""The element that sends an amphora's journal to a collector."""

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ELEMENT = Path(__file__).parents[3] / "diskimage/elements/amphora-log-upload"


def test_the_journal_upload_uses_no_client_certificate():
    """The amphora's certificate is for servers only. A collector that checks purposes would refuse it."""
    unit = ELEMENT / "static/etc/systemd/system/systemd-journal-upload.service.d/amphora.conf"
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(unit.read_text())
    words = parser["Service"]["ExecStart"].split()
    assert words[0] == "/usr/lib/systemd/systemd-journal-upload"
    assert {"--key=-", "--cert=-"} < set(words)
    files = [path for path in ELEMENT.rglob("*") if path.is_file()]
    assert [path.name for path in files if "/etc/amphora-agent" in path.read_text()] == []


@pytest.fixture
def hook(tmp_path):
    """The hook that runs on the build machine."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "bin/sudo").chmod(0o755)
    (tmp_path / "hooks").mkdir()

    def run(**more):
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "TMP_HOOKS_PATH": str(tmp_path / "hooks"),
            **more,
        }
        command = [shutil.which("bash"), ELEMENT / "extra-data.d/60-amphora-log-upload"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done, [path.read_text() for path in (tmp_path / "hooks").iterdir()]

    return run


def test_the_ca_of_the_collector_is_copied_to_the_image(hook, tmp_path):
    (tmp_path / "ca.pem").write_text("a certificate")
    done, copied = hook(AMPHORA_LOG_URL="https://192.0.2.9:19532", AMPHORA_LOG_CA=str(tmp_path / "ca.pem"))
    assert (done.returncode, copied) == (0, ["a certificate"]), done.stderr


@pytest.mark.parametrize("more", [{}, {"AMPHORA_LOG_CA": ""}, {"AMPHORA_LOG_CA": "/nonexistent"}])
def test_a_missing_ca_ends_the_build(hook, more):
    done, copied = hook(AMPHORA_LOG_URL="https://192.0.2.9:19532", **more)
    assert (done.returncode, copied) == (1, [])
    assert "AMPHORA_LOG_CA" in done.stderr


def test_no_ca_is_needed_without_encryption(hook):
    done, copied = hook(AMPHORA_LOG_URL="http://192.0.2.9:19532")
    assert (done.returncode, copied) == (0, []), done.stderr
