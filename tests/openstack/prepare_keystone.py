# SPDX-License-Identifier: Apache-2.0
"""Prepare Keystone's database: prepare_keystone.py FILE PASSWORD URL, in .sandbox/openstack-venv.

One process runs all commands of keystone-manage, because each process needs seconds of processor time to start.
"""

import sys

from keystone.cmd import cli

_, file, password, url = sys.argv
for words in (
    ["db_sync"],
    ["fernet_setup"],
    ["credential_setup"],
    [
        "bootstrap",
        *("--bootstrap-password", password, "--bootstrap-region-id", "RegionOne"),
        *(word for kind in ("public", "internal", "admin") for word in (f"--bootstrap-{kind}-url", url)),
    ],
):
    cli.CONF.reset()
    users = ["--keystone-user", "root", "--keystone-group", "root"] if words[0].endswith("_setup") else []
    cli.main(["keystone-manage", "--config-file", file, *words, *users])
