# SPDX-License-Identifier: Apache-2.0
"""Booting an image by hand with a stand-in for QEMU: arguments, output and cleanup."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from amphora_driver.compute.architecture import ARM64
from sandbox import boot_image

# Prints its arguments and its PID and runs until a QEMU shutdown.
_QEMU = """#!/bin/sh
trap 'echo ended; exit 0' TERM
printf 'told:'; printf ' %s' "$@"; echo
echo "in: $(pwd): $(ls -A | tr '\\n' ' ')"
while :; do sleep 0.1; done
"""


@pytest.fixture
def image(tmp_path):
    file = tmp_path / "x.qcow2"
    file.write_bytes(b"QFI\xfb" + bytes(508))
    return file


@pytest.fixture
def started(tmp_path, image):
    """A started boot by hand, and its output."""
    program = tmp_path / "bin/qemu-system-x86_64"
    program.parent.mkdir()
    program.write_text(_QEMU)
    program.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", boot_image.__name__, image.name, "--accelerator", "tcg", "--port", str(port)]
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("in: "):
                break
        yield process, said, temporary
        process.terminate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_every_end_removes_all_processes(started, number):
    process, said, temporary = started
    folder = Path(re.search(r"^in: (.*):", said, re.MULTILINE)[1])
    assert folder.parent == temporary
    process.send_signal(number)
    assert process.stdout.read() == "ended\n"
    assert process.wait() == 0
    assert list(temporary.iterdir()) == []


def test_the_output_names_the_files(started, image):
    _, said, _ = started
    folder = Path(re.search(r"--cacert (\S+)/amphora_ca.pem", said)[1])
    assert (folder / "amphora_ca.pem").read_bytes().startswith(b"-----BEGIN CERTIFICATE")
    assert (folder / "controller.pem").stat().st_mode & 0o077 == 0
    assert f"in: {folder}: amphora_ca.pem config.iso controller.pem" in said
    assert f"file={image},format=qcow2," in said


@pytest.mark.parametrize(
    ("manifest", "words", "program", "machine"),
    [
        (None, [], "qemu-system-x86_64", "pc"),
        ("{}", [], "qemu-system-x86_64", "pc"),
        ("not json", [], "qemu-system-x86_64", "pc"),
        ('{"architecture": "amd64"}', [], "qemu-system-x86_64", "pc"),
        ('{"architecture": "arm64"}', [], "qemu-system-aarch64", "virt"),
        ('{"architecture": "amd64"}', ["--arch", "arm64"], "qemu-system-aarch64", "virt"),
    ],
)
def test_the_machine_has_the_architecture_of_the_image(image, monkeypatch, manifest, words, program, machine):
    """The manifest beside the image names the architecture. QEMU brings no firmware for arm64."""
    run = []
    monkeypatch.setattr(boot_image, "_run", lambda argv, _folder: run.append(argv) or 0)
    monkeypatch.setattr(boot_image.shutil, "which", lambda _: "/usr/bin/qemu")
    if manifest is not None:
        image.with_suffix(".manifest").write_text(manifest)
    firmware = image.with_suffix(".fd")
    firmware.touch()
    assert boot_image.main([str(image), "--accelerator", "tcg", "--firmware", str(firmware), *words]) == 0
    (argv,) = run
    assert argv[0] == program
    assert argv[argv.index("-machine") + 1].split(",")[0] == machine
    assert ("vmgenid,guid=auto" in argv) == (machine == "pc")


def test_a_missing_program_is_reported_with_its_package(image, monkeypatch, capsys):
    arm = msgspec.structs.replace(ARM64, firmware=("/nowhere.fd", "some-firmware"))
    monkeypatch.setitem(boot_image.ARCHITECTURES, "arm64", arm)
    for there, words in (
        (None, "apt-get install qemu-system-arm"),
        ("x", "/nowhere.fd does not exist; apt-get install some-firmw"),
    ):
        monkeypatch.setattr(boot_image.shutil, "which", lambda _, there=there: there)
        with pytest.raises(SystemExit):
            boot_image.main([str(image), "--arch", "arm64"])
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("words", [["nowhere.qcow2"], ["x.qcow2", "--firmware", "nowhere.fd"]])
def test_a_missing_file_is_reported(image, monkeypatch, capsys, words):
    monkeypatch.chdir(image.parent)
    with pytest.raises(SystemExit):
        boot_image.main(words)
    assert re.search(r"nowhere\.\w+ does not exist", capsys.readouterr().err)


def test_a_port_in_use_is_reported(image, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SystemExit):
            boot_image.main([str(image), "--port", str(port)])
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
