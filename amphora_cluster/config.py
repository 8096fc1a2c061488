# SPDX-License-Identifier: Apache-2.0
"""The options of cluster membership, and the configuration file that sets them.

Invariant: the options are in a `ConfigOpts` object of their own. The file is separate from that of the driver, because
the service may run on other hosts. Its status page uses address, token and certificate of the group [amp_status_page],
as the processes of the driver do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oslo_config import cfg

from amphora_cluster import api_options as api
from amphora_cluster.cloud import options as cloud
from amphora_driver import config
from amphora_driver.config import status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amphora_driver.database.vault import Vault

DEFAULT_FILE = "/etc/amphora-cluster/amphora-cluster.conf"
FILE_VARIABLE = "AMPHORA_CLUSTER_CONFIG"
KEY_OPTION = "[amp_cluster] encryption_key_file"

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_cluster": {
        cfg.StrOpt("connection", default="sqlite:////var/lib/amphora-cluster/amphora-cluster.sqlite", secret=True): (
            "SQLAlchemy URL of the database with groups, requests and tokens. The default is an SQLite file, for one "
            "host. Several hosts need MariaDB or PostgreSQL."
        ),
        cfg.StrOpt("encryption_key_file", default="/etc/amphora-cluster/encryption.keys"): (
            "File with one Fernet key per line. The first key encrypts application credentials and the digests of "
            "tokens in the database; all keys decrypt."
        ),
        cfg.FloatOpt("poll_interval", default=5.0, min=0.1, max=3600.0): (
            "Seconds between two reads of a group's servers and pool without an event. 0.1 to 3600."
        ),
        cfg.IntOpt("threads", default=8, min=1, max=256): (
            "Number of groups that one controller processes at the same time. At most half of them are groups whose "
            "last pass failed. 1 to 256."
        ),
        cfg.FloatOpt("lease", default=15.0, min=1.0, max=600.0): (
            "Seconds until the lease of a group expires if its controller does not renew it. Another controller can "
            "then continue. 1 to 600."
        ),
        cfg.FloatOpt("pass_timeout", default=60.0, min=1.0, max=3600.0): (
            "Seconds that one pass over a group may take, including all calls to the cloud. 1 to 3600."
        ),
        cfg.FloatOpt("retry_first", default=1.0, min=0.1, max=600.0): (
            "Seconds before the first retry of a failed pass; each further retry doubles it. 0.1 to 600."
        ),
        cfg.FloatOpt("retry_most", default=60.0, min=0.1, max=3600.0): (
            "Longest back-off between retries in seconds. 0.1 to 3600."
        ),
        cfg.FloatOpt("statistics_age", default=60.0, min=10.0, max=3600.0): (
            "Maximum age in seconds of the statistics in Octavia. A drain that ends early because the statistics show "
            "no connection lasts at least this time. With the provider of this project, the sum of [amp_health] "
            "interval, [amp_health] statistics_interval and 11 seconds must stay below it. 10 to 3600."
        ),
        cfg.FloatOpt("request_retention", default=604800.0, min=60.0, max=31536000.0): (
            "Seconds for which ended requests, their idempotency keys, and the history of servers are kept. 60 to "
            "31536000."
        ),
        cfg.StrOpt("lock_dir", default="/run/amphora-cluster"): (
            "Directory of the files that show which controllers of a host are alive."
        ),
        cfg.PortOpt("status_port", default=9879, min=0): (
            "TCP port of the controller's health check and metrics. 0 to 65535; 0 disables them. [amp_status_page] has "
            "the address, the token and the certificate."
        ),
        cfg.StrOpt("notification_url", secret=True): (
            "URL of the message bus with Nova's versioned notifications: amqp://user:password@host:5672/vhost. A "
            "notification makes the next pass of its groups due at once. The default is none: the controllers poll."
        ),
        cfg.StrOpt("notification_topic", default="versioned_notifications"): (
            "Topic of Nova's versioned notifications."
        ),
    }
}


GROUPS = {
    group: config.with_help(options)
    for one in (OPTIONS, api.OPTIONS, cloud.OPTIONS, status.OPTIONS)
    for group, options in one.items()
}


def load(files: Sequence[str] | None = None) -> cfg.ConfigOpts:
    """Return the options of these files; by default of the file in the environment, or the default file.

    Raises:
        ConfigurationError: a file does not exist or is not valid.
    """
    return config.load_groups(GROUPS, files, "amphora-cluster", FILE_VARIABLE, DEFAULT_FILE)


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """Return all options by group, for oslo-config-generator."""
    return list(GROUPS.items())


def load_vault(conf: cfg.ConfigOpts) -> Vault:
    """Return the vault with the configured keys; raises ConfigurationError for an unusable file."""
    from amphora_driver.database.vault import Vault  # noqa: PLC0415 - the reference of options needs no cryptography

    return Vault.load(conf.amp_cluster.encryption_key_file, KEY_OPTION)
