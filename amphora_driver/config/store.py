# SPDX-License-Identifier: Apache-2.0
"""Options of the database and of the encryption key: group [amp_database]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_database": {
        cfg.StrOpt("connection", default="sqlite:////var/lib/amphora-driver/amphora-driver.sqlite", secret=True): (
            "SQLAlchemy URL of the database with the desired state, the jobs and the amphorae. The default is an "
            "SQLite file, for one host. Several hosts need MariaDB or PostgreSQL."
        ),
        cfg.StrOpt("encryption_key_file", default="/etc/amphora-driver/encryption.keys"): (
            "File with one Fernet key per line. The first key encrypts secrets in the database; all keys decrypt."
        ),
    }
}
