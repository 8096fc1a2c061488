# SPDX-License-Identifier: Apache-2.0
"""The config drive that the controller writes, read by other programs."""

import json
import subprocess

import pytest

from amphora_driver.compute.config_drive import build_config_drive, build_image
from amphora_driver.model.network import FixedAddress, Port, Route, Subnet

PORT = Port(
    id="port", network_id="management", mac="fa:16:3e:00:00:01", mtu=1450,
    addresses=(FixedAddress(subnet_id="four", address="203.0.113.9"),
               FixedAddress(subnet_id="six", address="2001:db8::9")),
)  # fmt: skip
SUBNETS = (
    Subnet(id="four", network_id="management", cidr="203.0.113.0/24", gateway="203.0.113.1",
           routes=(Route(destination="192.0.2.0/25", gateway="203.0.113.2"),)),
    Subnet(id="six", network_id="management", cidr="2001:db8::/64", gateway=None),
)  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Read a file with isoinfo(1) from the tree with the long names."""

    def reading(data, path):
        file = tmp_path / "drive.iso"
        file.write_bytes(data)
        command = ["isoinfo", "-J", "-i", str(file), "-x", path]
        return subprocess.run(command, capture_output=True, check=True).stdout

    return reading


def test_files_are_found_by_their_names(read):
    files = {"agent.conf": b"[agent]\n", "heartbeat.key": b"ab" * 32, "server.pem": b"x" * 9000}
    drive = build_config_drive("0b9d0000-0000-4000-8000-000000000001", "amphora-0b9d", files, PORT, SUBNETS)
    meta = json.loads(read(drive, "/openstack/latest/meta_data.json"))
    assert meta["uuid"] == "0b9d0000-0000-4000-8000-000000000001"
    assert meta["hostname"] == "amphora-0b9d"
    found = {one["path"]: read(drive, f"/openstack{one['content_path']}") for one in meta["files"]}
    assert found == {f"/etc/amphora-agent/{name}": content for name, content in files.items()}


def test_the_management_network_has_the_format_of_nova(read):
    drive = build_config_drive("0b9d0000-0000-4000-8000-000000000001", "amphora", {}, PORT, SUBNETS)
    told = json.loads(read(drive, "/openstack/latest/network_data.json"))
    assert [(link["ethernet_mac_address"], link["mtu"]) for link in told["links"]] == [("fa:16:3e:00:00:01", 1450)]
    four, six = told["networks"]
    assert (four["type"], four["ip_address"], four["netmask"]) == ("ipv4", "203.0.113.9", "255.255.255.0")
    assert four["routes"] == [
        {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "203.0.113.1"},
        {"network": "192.0.2.0", "netmask": "255.255.255.128", "gateway": "203.0.113.2"},
    ]
    assert (six["type"], six["ip_address"], six["netmask"]) == ("ipv6", "2001:db8::9", "ffff:ffff:ffff:ffff::")
    assert six["routes"] == []
    assert four["link"] == six["link"] == told["links"][0]["id"]


def test_the_drive_is_found_by_its_label(tmp_path):
    file = tmp_path / "drive.iso"
    file.write_bytes(build_image({"x": b""}))
    command = ["blkid", "-o", "value", "-s", "LABEL", "-s", "TYPE", file]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["config-2", "iso9660"]


@pytest.mark.parametrize(("sizes"), [(0,), (1,), (2047, 2048, 2049), (100_000,)])
def test_contents_of_any_length_are_complete(read, sizes):
    files = {f"deep/er/file-{size}.with.dots": bytes(n % 251 for n in range(size)) for size in sizes}
    made = build_image(files)
    assert {path: read(made, f"/{path}") for path in files} == files
