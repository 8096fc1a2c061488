# SPDX-License-Identifier: Apache-2.0
"""The configuration files, keys and certificates of a sandbox.

Invariant: the sandbox writes a file only if the content changes. It creates keys and certificate authorities once, so
that a restart of the sandbox does not invalidate the certificates of running amphorae.
"""

from __future__ import annotations

import os
import sys
from configparser import ConfigParser
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.fernet import Fernet

from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.compute import kvm_probe
from sandbox import topology

if TYPE_CHECKING:
    from sandbox.settings import Settings

PROGRAM = "qemu-system-x86_64"
HEALTH_PORT = 9879
STATUS_PORT = 9878
_CLIENT_DAYS = 3650
# Boot time-out in seconds of an emulated virtual machine on a busy host.
_EMULATED_BOOT = "900"
_Sections = dict[str, dict[str, str]]


def write(settings: Settings) -> None:
    """Create directories, configuration files, keys and certificates that are missing or outdated."""
    for name in ("etc", "data", "run", "log", "amphorae", "machines", "tls"):
        Path(settings.state, name).mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(settings.driver_configuration, _ini(_driver_options(settings)))
    _write(settings.octavia_configuration, _ini(_octavia_options(settings)))
    _write(settings.clouds, _clouds(settings))
    _write(settings.etc / "policy.yaml", "{}\n")
    _write(settings.env, _env(settings))
    keys = settings.etc / "encryption.keys"
    if not keys.exists():
        _write(keys, Fernet.generate_key().decode() + "\n")
    if not (settings.etc / "controller.pem").exists():
        _certificates(settings.etc)


def _driver_options(settings: Settings) -> _Sections:
    keys = str(settings.etc / "encryption.keys")
    ours = {
        "amp_database": {"connection": settings.database_url, "encryption_key_file": keys},
        "amp_queue": {
            "socket_dir": str(settings.run / "sockets"),
            **({"engine": "celery", "broker_url": settings.broker_url} if settings.broker_url else {}),
        },
        # All controllers of a sandbox run on one host. So a controller that has not renewed its lease for 3 s has
        # ended.
        "amp_controller": {"lease": "3"},
        "amp_agent": {"services": "supervisor"},
        "amp_octavia": {f"{name}_socket": str(settings.run / f"{name}.sock") for name in ("status", "stats", "get")},
        "amp_health": {
            "bind_address": topology.CONTROL_ADDRESS,
            "bind_port": str(HEALTH_PORT),
            "targets": f"{topology.CONTROL_ADDRESS}:{HEALTH_PORT}",
            "interval": "1",
        },
        # The witness is a host on the management network. If it answers while all amphorae are silent, the network
        # works.
        "amp_failover": {"witnesses": f"{topology.WITNESS_ADDRESS}:{topology.WITNESS_PORT}"},
        "amp_status_page": {"bind_address": "127.0.0.1", "bind_port": str(STATUS_PORT)},
        "amp_compute_netns": {
            "directory": str(settings.amphorae),
            "prefix": settings.prefix,
            "agent_python": settings.agent_python,
            "management_network": topology.MANAGEMENT_NETWORK,
        },
        "amp_compute_qemu": {
            "directory": str(settings.machines),
            "prefix": settings.prefix,
            "program": PROGRAM,
            "image_directory": settings.images or str(settings.data / "images"),
            "management_network": topology.MANAGEMENT_NETWORK,
        },
        "amp_network_local": {"switch": settings.switch},
        "amp_certificates": {
            "ca_certificate": str(settings.etc / "amphora_ca.pem"),
            "ca_private_key": str(settings.etc / "amphora_ca.key"),
            "client_ca": str(settings.etc / "controller_ca.pem"),
            "client_certificate": str(settings.etc / "controller.pem"),
        },
    }
    if settings.compute == "qemu":
        ours = _merged(ours, _qemu_options(emulated=uses_emulation(settings)))
    return _merged(ours, settings.options)


def _merged(first: _Sections, second: _Sections) -> _Sections:
    return {group: {**first.get(group, {}), **second.get(group, {})} for group in {**first, **second}}


def uses_emulation(settings: Settings) -> bool:
    """Whether the amphorae are virtual machines without KVM."""
    return settings.compute == "qemu" and not kvm_probe.usable(PROGRAM)


def _qemu_options(*, emulated: bool) -> _Sections:
    """The options that differ for virtual machines. Emulated machines get longer time-outs."""
    ours: _Sections = {"amp_compute": {"driver": "qemu"}, "amp_agent": {"services": "systemd"}}
    if emulated:
        ours["amp_agent"] |= {"connect_timeout": "15", "request_timeout": "180"}
        ours["amp_controller"] = {"boot_timeout": _EMULATED_BOOT}
        ours["amp_failover"] = {"silent_after": "30", "probe_timeout": "15"}
    return ours


def _octavia_options(settings: Settings) -> _Sections:
    ours: _Sections = {
        # The driver uses no workers of Octavia, so octavia-api needs no message broker.
        "DEFAULT": {"transport_url": "fake://"},
        "oslo_messaging_notifications": {"driver": "noop"},
        "oslo_concurrency": {"lock_path": str(settings.run / "lock")},
        "oslo_policy": {"policy_file": str(settings.etc / "policy.yaml")},
        "database": {"connection": settings.octavia_database_url, "sqlite_synchronous": "False"},
        "api_settings": {
            "bind_host": "127.0.0.1",
            "bind_port": str(settings.octavia_port),
            "api_base_uri": settings.endpoint,
            "auth_strategy": "noauth",
            "healthcheck_enabled": "True",
            "enabled_provider_drivers": "haproxy: HAProxy and keepalived in amphorae",
            "default_provider_driver": "haproxy",
        },
        "controller_worker": {"network_driver": "amphora_sandbox_network"},
        # Octavia copies each default time-out other than 0 into each listener. Copied time-outs would override the
        # time-outs of a flavor.
        "haproxy_amphora": {f"timeout_{one}": "0" for one in ("client_data", "member_connect", "member_data")},
        "certificates": {"cert_manager": "local_cert_manager", "storage_path": str(settings.tls)},
        "driver_agent": {
            **{f"{name}_socket_path": str(settings.run / f"{name}.sock") for name in ("status", "stats", "get")},
            "enabled_provider_agents": "haproxy",
            "provider_agent_shutdown_timeout": "5",
        },
    }
    return _merged(ours, settings.octavia_options)


def _clouds(settings: Settings) -> str:
    return f"""clouds:
  sandbox:
    auth_type: none
    auth:
      endpoint: {settings.endpoint}
    load_balancer_endpoint_override: {settings.endpoint}
    network_endpoint_override: {settings.network_endpoint}
"""


def _env(settings: Settings) -> str:
    """The shell environment for clients of this sandbox."""
    exports = {**settings.environment(), "PATH": f"{Path(sys.executable).parent}:$PATH"}
    # All programs of the sandbox use the bytecode cache that the quickstart script has chosen.
    prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    if prefix:
        exports["PYTHONPYCACHEPREFIX"] = prefix
    return "".join(f'export {name}="{value}"\n' for name, value in exports.items())


def _certificates(folder: Path) -> None:
    """Create the certificate authorities of amphorae and controllers, and the client certificate."""
    certificate, key = create_authority("sandbox amphorae")
    _write(folder / "amphora_ca.pem", certificate.decode())
    _write(folder / "amphora_ca.key", key.reveal().decode())
    certificate, key = create_authority("sandbox controllers")
    _write(folder / "controller_ca.pem", certificate.decode())
    client = Authority(certificate, key).issue_client("sandbox controller", _CLIENT_DAYS)
    # controller.pem is written last: if it exists, all certificates exist.
    _write(folder / "controller.pem", client.bundle().reveal().decode())


def _ini(sections: _Sections) -> str:
    parser = ConfigParser(interpolation=None, default_section="no default section")
    parser.read_dict(sections)
    text = StringIO()
    parser.write(text)
    return text.getvalue()


def _write(path: Path, content: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == content:
        return
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(content, encoding="utf-8")
    temporary.chmod(0o600)
    temporary.replace(path)
