# SPDX-License-Identifier: Apache-2.0
"""The options of the services of `whole_cloud.py`, by service and section."""

from __future__ import annotations

from typing import ClassVar

from cloud_lab import VENV, Cloud, merged


class ServiceOptions(Cloud):
    """The services with their users and their entries in the catalogue.

    Args:
        transport: the URL of RabbitMQ for oslo.messaging.
    """

    threads: ClassVar = {"keystone": 6, "neutron": 8, "placement": 3, "glance": 3, "nova": 6, "barbican": 3}
    accounts: ClassVar = (
        *((name, "service", ("admin", "service")) for name in ("neutron", "placement", "glance", "nova", "barbican")),
        ("heat", "service", ("admin", "service")),
        ("octavia", "service", ("admin", "service", "creator")),
        ("demo", "demo", ("member", "load-balancer_member", "creator")),
        ("other", "other", ("member", "load-balancer_member", "creator")),
    )
    catalogue: ClassVar = {
        "neutron": ("network", ""),
        "placement": ("placement", ""),
        "glance": ("image", ""),
        "nova": ("compute", "/v2.1"),
        "barbican": ("key-manager", ""),
        "octavia": ("load-balancer", ""),
        # Only the tests of `heat_service.py` start it.
        "heat": ("orchestration", "/v1/%(tenant_id)s"),
    }

    def __init__(self, folder, databases, ports, transport):
        super().__init__(folder, databases, ports)
        self.transport = transport

    def _neutron(self):
        ours = {
            "DEFAULT": {
                "transport_url": self.transport,
                "notify_nova_on_port_status_changes": True,
                "notify_nova_on_port_data_changes": True,
            },
            "nova": self.auth("nova"),
            "oslo_messaging_notifications": {"driver": "noop"},
        }
        return merged(super()._neutron(), ours)

    def _placement(self):
        return {
            "placement_database": {"connection": self.databases["placement"]},
            "keystone_authtoken": self.token("placement"),
        }

    def _glance(self):
        place = self.folder / "images"
        stores = {"os_glance_staging_store": "staging", "os_glance_tasks_store": "tasks", "file": "store"}
        return {
            "DEFAULT": {"enabled_backends": "file:file", "enabled_import_methods": "[glance-direct]"},
            "glance_store": {"default_backend": "file"},
            **{section: {"filesystem_store_datadir": place / name} for section, name in stores.items()},
            "paste_deploy": {"flavor": "keystone", "config_file": VENV / "etc/glance/glance-api-paste.ini"},
            "keystone_authtoken": self.token("glance"),
            "oslo_messaging_notifications": {"driver": "noop"},
        }

    def _nova(self):
        pool = {"max_pool_size": 5, "max_overflow": 20}
        return {
            "DEFAULT": {
                "transport_url": self.transport,
                "my_ip": "127.0.0.1",
                "compute_driver": "lab.LabDriver",
                "instances_path": self.folder / "instances",
                "rootwrap_config": VENV / "etc/nova/rootwrap.conf",
                "graceful_shutdown_timeout": 1,
                # A test that stops a compute host waits until Nova reports it as down.
                "report_interval": 2,
                "service_down_time": 10,
            },
            "api_database": {"connection": self.databases["nova_api"], **pool},
            "wsgi": {"api_paste_config": VENV / "etc/nova/api-paste.ini"},
            "keystone_authtoken": self.token("nova"),
            "service_user": {"send_service_user_token": True, **self.auth("nova")},
            **{name: self.auth("nova") for name in ("neutron", "placement", "glance", "cinder")},
            "vnc": {"enabled": False},
            "scheduler": {"workers": 1},
            # Nova's default filters, and the one that evaluates the hint of the backend (docs/reference/nova.md).
            "filter_scheduler": {
                "enabled_filters": "ComputeFilter,ComputeCapabilitiesFilter,ImagePropertiesFilter,"
                "ServerGroupAntiAffinityFilter,ServerGroupAffinityFilter,DifferentHostFilter"
            },
            "conductor": {"workers": 1},
            # Cluster membership receives them.
            "oslo_messaging_notifications": {"driver": "messagingv2"},
            "notifications": {"notification_format": "versioned"},
        }

    def _barbican(self):
        return {
            "DEFAULT": {"host_href": f"http://127.0.0.1:{self.ports['barbican']}", "db_auto_create": True},
            "secretstore": {"enabled_secretstore_plugins": "store_crypto", "enable_multiple_secret_stores": False},
            "crypto": {"enabled_crypto_plugins": "simple_crypto"},
            # 32 bytes in base64: the key that encrypts the keys of projects.
            "simple_crypto_plugin": {"kek": "bGFiIGxhYiBsYWIgbGFiIGxhYiBsYWIgbGFiIGxhYiE="},
            "queue": {"enable": False},
            "keystone_authtoken": self.token("barbican"),
        }
