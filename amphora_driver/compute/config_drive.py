# SPDX-License-Identifier: Apache-2.0
"""The boot files of a virtual machine, on a config drive like Nova's or in Nova's user data.

`amphora_agent/config_drive.py` reads both in the image. Nova limits only the size of the user data. For injected files,
Nova has a quota of five by default, and its newer API versions refuse them.

Invariant: no I/O. An image that boots from this drive also boots from a drive of Nova. The label is ``config-2``. The
directory ``openstack/latest`` has ``meta_data.json``, ``network_data.json`` and ``user_data``. ``files`` in
``meta_data.json`` maps contents to paths (Nova's documentation, "Metadata").
"""

from __future__ import annotations

import base64
import io
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import msgspec
import pycdlib

from amphora_driver.errors import ComputeError
from amphora_driver.model.network import Port, Subnet
from amphora_driver.secret import Secret

LABEL = "config-2"
AGENT_DIRECTORY = "/etc/amphora-agent"
USER_DATA_KEY = "amphora_files"
# Maximum number of characters of base64-encoded user data that Nova accepts.
USER_DATA_LIMIT = 65535


class _InjectedFile(msgspec.Struct, frozen=True, kw_only=True):
    content_path: str
    path: str


class _MetaData(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    hostname: str
    name: str
    availability_zone: str = ""
    launch_index: int = 0
    meta: dict[str, str] = {}
    files: tuple[_InjectedFile, ...]


class _NetworkRoute(msgspec.Struct, frozen=True, kw_only=True):
    network: str
    netmask: str
    gateway: str


class _Network(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    link: str
    type: str
    ip_address: str
    netmask: str
    network_id: str
    routes: tuple[_NetworkRoute, ...]


class _Link(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str
    ethernet_mac_address: str
    mtu: int


class NetworkData(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``network_data.json``: the interfaces that the guest configures."""

    links: tuple[_Link, ...]
    networks: tuple[_Network, ...]
    services: tuple[str, ...] = ()


def build_config_drive(
    amphora_id: str, hostname: str, files: Mapping[str, bytes], port: Port, subnets: Sequence[Subnet]
) -> bytes:
    """Return the ISO 9660 image of an amphora's config drive.

    `files` has the files for ``/etc/amphora-agent`` by name. `port` is the port on the management network, and
    `subnets` are those of its addresses.
    """
    names = sorted(files)
    injected = tuple(
        _InjectedFile(content_path=f"/content/{number:04}", path=f"{AGENT_DIRECTORY}/{name}")
        for number, name in enumerate(names)
    )
    meta = _MetaData(uuid=amphora_id, hostname=hostname, name=hostname, files=injected)
    written = {
        "openstack/latest/meta_data.json": msgspec.json.encode(meta),
        "openstack/latest/network_data.json": msgspec.json.encode(build_network_data(port, subnets)),
        "openstack/latest/user_data": b"",
        **{f"openstack/content/{number:04}": files[name] for number, name in enumerate(names)},
    }
    return build_image(written)


def build_image(files: Mapping[str, bytes]) -> bytes:
    """Return an ISO 9660 image with the label and these files, by path below the root.

    Interchange level 4 and Joliet keep the names unchanged: the guest mounts either tree.
    """
    image = pycdlib.PyCdlib()
    image.new(interchange_level=4, joliet=3, vol_ident=LABEL)
    folders = {str(parent) for path in files for parent in PurePosixPath("/", path).parents} - {"/"}
    for folder in sorted(folders):
        image.add_directory(folder, joliet_path=folder)
    for path, content in sorted(files.items()):
        image.add_fp(io.BytesIO(content), len(content), f"/{path}", joliet_path=f"/{path}")
    written = io.BytesIO()
    image.write_fp(written)
    image.close()
    return written.getvalue()


def build_network_data(port: Port, subnets: Sequence[Subnet]) -> NetworkData:
    """Return the management interface with all its addresses and the routes of their subnets."""
    known = {subnet.id: subnet for subnet in subnets}
    networks = []
    for number, fixed in enumerate(port.addresses):
        subnet = known[fixed.subnet_id]
        network = ipaddress.ip_network(subnet.cidr)
        networks.append(
            _Network(
                id=f"network{number}",
                link="management",
                type=f"ipv{network.version}",
                ip_address=fixed.address,
                netmask=str(network.netmask),
                network_id=subnet.network_id,
                routes=_routes(subnet),
            )
        )
    link = _Link(id="management", type="bridge", ethernet_mac_address=port.mac, mtu=port.mtu)
    return NetworkData(links=(link,), networks=tuple(networks))


def _routes(subnet: Subnet) -> tuple[_NetworkRoute, ...]:
    default = "::/0" if ":" in subnet.cidr else "0.0.0.0/0"
    wanted = [(default, subnet.gateway)] if subnet.gateway else []
    wanted += [(route.destination, route.gateway) for route in subnet.routes]
    found = [(ipaddress.ip_network(destination), gateway) for destination, gateway in wanted]
    return tuple(
        _NetworkRoute(network=str(network.network_address), netmask=str(network.netmask), gateway=gateway)
        for network, gateway in found
    )


def build_user_data(files: Mapping[str, bytes], wanted: str) -> Secret:
    """Return the document with these files, encoded as base64.

    Args:
        files: the contents by name in ``/etc/amphora-agent``.
        wanted: the attempted operation, as an infinitive.

    Raises:
        ComputeError: a file is not text, or the document is longer than Nova's limit.
    """
    try:
        texts = {name: content.decode() for name, content in sorted(files.items())}
    except UnicodeDecodeError:
        # `from None` drops the decoder's error, which quotes the file. The file may contain a private key.
        raise ComputeError(wanted, "a boot file is not text in UTF-8", final=True) from None
    encoded = base64.b64encode(msgspec.json.encode({USER_DATA_KEY: texts}))
    if len(encoded) > USER_DATA_LIMIT:
        happened = f"the boot files have {len(encoded)} characters as base64, and Nova accepts {USER_DATA_LIMIT}"
        raise ComputeError(wanted, happened, "Use shorter certificate chains in [amp_certificates].", final=True)
    return Secret(encoded)
