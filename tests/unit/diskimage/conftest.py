# SPDX-License-Identifier: Apache-2.0
"""The image builder is not part of the installed package, so the tests import it from the repository."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

STATUS = """\
Package: libstdc++6
Status: install ok installed
Architecture: amd64
Source: gcc-14 (14.2.0-19)
Version: 14.2.0-19
Description: a library
 Version: 1 is not a field

Package: haproxy
Status: install ok installed
Architecture: amd64
Version: 3.0.11-1+deb13u5

Package: grub-common
Status: deinstall ok config-files
Architecture: amd64
Version: 2.12-9
"""

DIGESTS = f"""\
haproxy 3.0.11-1+deb13u5 amd64 {"ab" * 32}
libstdc++6 14.2.0-20 amd64 {"cd" * 32}
"""


@pytest.fixture
def tree(tmp_path):
    """A minimal image."""
    root = tmp_path / "root"
    site = root / "opt/amphora-agent/lib/python3.13/site-packages"
    for name, version, more in (
        ("Flask", "3.1.3", "License-Expression: BSD-3-Clause\n"),
        ("octavia-amphora-driver", "0.1.0", ""),
    ):
        place = site / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}\nA text.\n")
    for name, text in (
        ("var/lib/dpkg/status", STATUS),
        ("usr/share/amphora/deb-digests", DIGESTS),
        ("etc/machine-id", ""),
        ("usr/lib/os-release", 'ID=debian\nVERSION_ID="13"\nVERSION="13 (trixie)"\n'),
        ("etc/shadow", "root:!*:20000:0:99999:7:::\nhaproxy:!:20000::::::\n"),
        ("lib/modules/6.12.1-cloud-amd64/modules.dep", ""),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
