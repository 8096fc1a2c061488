# SPDX-License-Identifier: Apache-2.0
"""A fresh Debian host becomes a controller by the commands of docs/how-to/install.md."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/install.md"
# pip gets the dependencies from a directory instead of an index.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/dependencies"}
UNITS = ("amphora-controller", "amphora-health-manager", "amphora-cluster", "amphora-cluster-api")

pytestmark = [pytest.mark.extended, pytest.mark.quiet, pytest.mark.root, pytest.mark.lasts(1800)]


def steps():
    """The blocks of the page that are marked `sh`, in their order."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def mode(tree, path):
    return tree.run(["stat", "--format=%U %G %a", path]).strip()


def test_a_fresh_host_is_installed_by_the_page(tree, wheels):
    place = tree.root / "root/amphora"
    shutil.copytree(wheels, place)
    shutil.copy(ROOT / "constraints.txt", place)
    blocks = steps()
    assert len(blocks) == 5
    for block in blocks:
        # The page has MariaDB on another host, which does not exist here.
        script = re.sub(r"^connection = .*$", "", block, flags=re.MULTILINE)
        tree.shell(script, OFFLINE)
    # Only the group can read the encryption keys, and Octavia's user, a member of the group, no key of a certificate.
    assert mode(tree, "/etc/amphora-driver/encryption.keys") == "root amphora-driver 640"
    assert mode(tree, "/etc/amphora-driver/amphora-driver.conf") == "root amphora-driver 640"
    assert mode(tree, "/etc/amphora-driver/amphora_ca.key") == "amphora-driver amphora-driver 600"
    assert mode(tree, "/etc/amphora-driver/controller.pem") == "amphora-driver amphora-driver 600"
    assert mode(tree, "/run/amphora-driver/alive") == "root amphora-driver 2770"
    # systemd accepts the units, whose programs exist.
    files = [f"/etc/systemd/system/{unit}.service" for unit in UNITS]
    assert tree.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *files]) == ""
    # The schema is complete, and the user of the services can use database, keys and sockets.
    found = tree.run(["runuser", "-u", "amphora-driver", "--", "amphoractl", "database", "status", "-f", "json"])
    assert json.loads(found)["Fits"] is True, found
    checks = tree.command(["runuser", "-u", "amphora-driver", "--", "amphoractl", "status", "check", "-f", "csv"])
    said = subprocess.run(checks, capture_output=True, text=True, check=False).stdout
    rows = {row["Check"]: row["Result"] for row in csv.DictReader(said.splitlines())}
    assert {rows[name] for name in ("Keys", "Database", "Local sockets")} == {"Success"}, said
