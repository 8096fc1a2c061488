# SPDX-License-Identifier: Apache-2.0
"""An image contains no trace of its build host."""

import pytest

from diskimage import traces

WORDS = ["packages.example.net", "builder-7"]


def test_a_clean_tree_has_no_traces(tree):
    assert list(traces.find_traces(tree, WORDS)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("etc/apt/sources.list.d/default.list", "deb x y z"),
        ("etc/apt/preferences.d/amphora", ""),
        ("etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
        ("etc/machine-id", "uninitialized\n"),
        ("etc/ssh/ssh_host_ed25519_key", ""),
        ("root/.ssh/authorized_keys", "ssh-ed25519 A"),
        ("root/.bash_history", "ls"),
        ("home/me/.ssh/authorized_keys", ""),
        ("var/log/apt/history.log", ""),
        ("var/lib/apt/lists/x_InRelease", ""),
        ("var/lib/systemd/random-seed", "x"),
        ("etc/resolv.conf", "nameserver 192.0.2.1\n"),
        ("etc/shadow", "root:$y$j9T$x:20000::::::\n"),
        ("etc/shadow", "me::20000::::::\n"),
        ("etc/chrony/chrony.conf", "server packages.example.net"),
        ("opt/amphora-agent/direct_url.json", "file:///tmp/builder-7/x"),
        ("etc/ssl/private/x.key", f"-----BEGIN PRIVATE KEY-----\n{'A' * 64}\n"),
        ("opt/amphora-agent/lib/python3.13/site-packages/pip/x.py", ""),
        ("etc/dib-manifests/dib_environment", ""),
        ("usr/local/bin/install-packages", ""),
    ],
)
def test_traces_are_found(tree, name, text):
    file = tree / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert list(traces.find_traces(tree, WORDS)) != []


@pytest.mark.parametrize("name", ["var/lib/dpkg/info/base.postinst", "usr/share/doc/x/copyright"])
def test_files_of_packages_are_not_traces(tree, name):
    file = tree / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("see packages.example.net")
    assert list(traces.find_traces(tree, WORDS)) == []
