# SPDX-License-Identifier: Apache-2.0
"""The case `resource` of the harness: imports, installation size and idle daemons."""

import sys
import uuid
from importlib import metadata

from adapter_heartbeats import heartbeat_key
from cryptography.fernet import Fernet

from amphora_driver import config
from amphora_driver.database import migrate


class Processes:
    """The idle daemons and the requirements."""

    def imports(self):
        return {
            "provider-driver": "import amphora_driver.driver",
            "worker": "import amphora_driver.controller.service",
            "health-manager": "import amphora_driver.health.service",
            "agent": "import amphora_agent.server",
        }

    def closures(self):
        """The direct requirements by extra; the package without extras has none."""
        from packaging.requirements import Requirement  # noqa: PLC0415

        found = {"driver": [], "agent": []}
        for text in metadata.requires("octavia-amphora-driver"):
            one = Requirement(text)
            for extra, names in found.items():
                if one.marker and one.marker.evaluate({"extra": extra}):
                    names.append(one.name)
        return {
            "agent image": ["octavia-amphora-driver", *found["agent"]],
            "control plane": ["octavia-amphora-driver", *found["driver"]],
        }

    def processes(self):
        etc = self.folder / "etc"
        conf = _configuration(etc)
        return [
            {
                "name": "amphora-controller", "expect": 2, "env": {config.FILE_VARIABLE: str(conf)},
                "argv": [sys.executable, "-m", "amphora_driver.controller.service"],
            },
            {
                "name": "amphora-health-manager", "expect": 2, "env": {config.FILE_VARIABLE: str(conf)},
                "argv": [sys.executable, "-m", "amphora_driver.health.service"],
            },
            {
                "name": "amphora-agent", "expect": 1,
                "argv": ["unshare", "--mount", "/bin/sh", "-c", _agent_script(self.folder / "agent")],
            },
        ]  # fmt: skip


def _configuration(etc):
    """Write all files that controller and health manager read at their start."""
    from amphora_driver.certificates.ca import Authority, create_authority  # noqa: PLC0415

    etc.mkdir(parents=True, exist_ok=True)
    certificate, key = create_authority("bench amphorae")
    (etc / "amphora_ca.pem").write_bytes(certificate)
    (etc / "amphora_ca.key").write_bytes(key.reveal())
    certificate, key = create_authority("bench controllers")
    (etc / "controller_ca.pem").write_bytes(certificate)
    (etc / "controller.pem").write_bytes(Authority(certificate, key).issue_client("bench", 30).bundle().reveal())
    (etc / "encryption.keys").write_bytes(Fernet.generate_key())
    (etc / "encryption.keys").chmod(0o600)
    for path in etc.iterdir():
        path.chmod(0o600)
    migrate.upgrade(f"sqlite:///{etc}/store.sqlite")
    conf = etc / "amphora-driver.conf"
    conf.write_text(
        f"""[amp_database]
connection = sqlite:///{etc}/store.sqlite
encryption_key_file = {etc}/encryption.keys
[amp_queue]
socket_dir = {etc}/bells
[amp_health]
bind_address = 127.0.0.1
bind_port = 15557
[amp_compute_netns]
directory = {etc}/amphorae
agent_python = {sys.executable}
[amp_certificates]
ca_certificate = {etc}/amphora_ca.pem
ca_private_key = {etc}/amphora_ca.key
client_ca = {etc}/controller_ca.pem
client_certificate = {etc}/controller.pem
"""
    )
    return conf


def _agent_script(folder):
    """A script that starts the agent in its own mount namespace, because its paths are fixed."""
    from amphora_driver.certificates.ca import Authority, create_authority  # noqa: PLC0415

    amphora = str(uuid.uuid4())
    etc = folder / "etc"
    etc.mkdir(parents=True, exist_ok=True)
    certificate, key = create_authority("bench")
    (etc / "client_ca.pem").write_bytes(certificate)
    (etc / "server.pem").write_bytes(Authority(certificate, key).issue_server(amphora, 30).bundle().reveal())
    (etc / "heartbeat.key").write_text(heartbeat_key(amphora).reveal().hex())
    (etc / "agent.conf").write_text(
        f"[agent]\namphora_id = {amphora}\nbind_address = 127.0.0.1\nbind_port = 15558\nservices = supervisor\n"
        "[heartbeat]\ntargets = 127.0.0.1:15559\n"
    )
    (folder / "all-etc").mkdir(exist_ok=True)
    return f"""set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
cp -a /etc/. {folder}/all-etc
mount --bind {folder}/all-etc /etc
mkdir -p /etc/amphora-agent /run/netns
cp -a {etc}/. /etc/amphora-agent
ip netns add amphora-haproxy
exec {sys.executable} -m amphora_agent.server
"""
