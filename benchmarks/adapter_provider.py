# SPDX-License-Identifier: Apache-2.0
"""The case `provider` of the harness: calls from Octavia, each with a new object."""

import itertools
import os
import uuid

from cryptography.fernet import Fernet

from amphora_driver import config


class Provider:
    """The calls. Their records stay: the database grows with every call."""

    def provider_setup(self, spec):
        conf = self.folder / "amphora-driver.conf"
        keys = self.folder / "encryption.keys"
        keys.write_bytes(Fernet.generate_key())
        keys.chmod(0o600)
        conf.write_text(
            f"[amp_database]\nconnection = {self.url.replace('%', '%%')}\nencryption_key_file = {keys}\n"
            f"[amp_queue]\nsocket_dir = {self.folder}/bells\n"
        )
        os.environ[config.FILE_VARIABLE] = str(conf)
        from octavia_lib.api.drivers import data_models  # noqa: PLC0415 - other cases measure imports

        from amphora_driver.driver import AmphoraProviderDriver  # noqa: PLC0415

        provider = AmphoraProviderDriver()
        listener, pool, project = spec["listeners"][0], spec["pools"][0], spec["project_id"]
        common = {"project_id": project, "admin_state_up": True}
        member = data_models.Member(
            member_id="", pool_id=pool["id"], address="10.1.1.1", protocol_port=80, weight=1, backup=False, name="m",
            subnet_id=spec["vip"]["subnet_id"], monitor_address=None, monitor_port=None, **common,
        )  # fmt: skip
        a_listener = {
            "listener_id": "", "name": "l", "loadbalancer_id": spec["id"], "protocol_port": 8080,
            "connection_limit": 2000, "default_pool_id": pool["id"], "insert_headers": listener["insert_headers"],
            "timeout_client_data": 50000, "timeout_member_connect": 5000, "timeout_member_data": 50000,
            "timeout_tcp_inspect": 0, "description": "", **common,
        }  # fmt: skip
        http = data_models.Listener(protocol="HTTP", **a_listener)
        tls = data_models.Listener(
            protocol="TERMINATED_HTTPS", default_tls_container_ref="ref", default_tls_container_data=_certificate(),
            **a_listener,
        )  # fmt: skip
        balancer = data_models.LoadBalancer(
            loadbalancer_id="", name="lb", vip_address=spec["vip"]["ip"], vip_network_id=spec["vip"]["network_id"],
            vip_port_id=spec["vip"]["port_id"], vip_subnet_id=spec["vip"]["subnet_id"], **common,
        )  # fmt: skip
        another = data_models.Pool(
            pool_id="", name="p", loadbalancer_id=spec["id"], protocol="HTTP", lb_algorithm="ROUND_ROBIN", members=[],
            **common,
        )  # fmt: skip
        self._numbers = itertools.count()
        self._calls = {
            "member_create": (provider.member_create, member, "member_id"),
            "listener_create": (provider.listener_create, http, "listener_id"),
            "listener_create_tls": (provider.listener_create, tls, "listener_id"),
            "loadbalancer_create": (provider.loadbalancer_create, balancer, "loadbalancer_id"),
            "pool_create": (provider.pool_create, another, "pool_id"),
        }

    def provider_call(self, call):
        if call not in self._calls:
            raise NotImplementedError(f"{call}: provider calls here create no dictionaries")
        method, source, name = self._calls[call]
        setattr(source, name, str(uuid.uuid4()))
        if call == "member_create":
            # An address and port must be unique in a pool.
            number = next(self._numbers)
            source.address = f"10.1.{number // 250 % 250}.{number % 250 + 1}"
        method(source)


def _certificate():
    """A valid certificate with its CA: the driver refuses an invalid one."""
    from amphora_driver.certificates.ca import Authority, create_authority  # noqa: PLC0415

    authority, key = create_authority("bench")
    issued = Authority(authority, key).issue_server(str(uuid.uuid4()), 30)
    return {
        "id": "x" * 40,
        "primary_cn": "bench",
        "certificate": issued.certificate,
        "private_key": issued.key.reveal(),
        "intermediates": [authority],
        "passphrase": None,
    }
