# SPDX-License-Identifier: Apache-2.0
"""The reader of the config drive, also with hostile drives."""

import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from amphora_agent import cloud_network, config_drive
from amphora_agent.config_drive import DriveContent, Places
from amphora_agent.errors import SettingsError

SETTINGS = b"[agent]\nbind_address = 192.0.2.11\n"
MAC, OTHER_MAC = "52:54:00:00:00:11", "52:54:00:00:00:12"
NETWORK = {
    "links": [
        {"id": "vip", "type": "bridge", "ethernet_mac_address": OTHER_MAC, "mtu": 9000},
        {"id": "management", "type": "bridge", "ethernet_mac_address": MAC.upper(), "mtu": 1450},
    ],
    "networks": [
        {"link": "vip", "type": "ipv4", "ip_address": "198.51.100.5", "netmask": "255.255.255.0", "routes": []},
        {
            "link": "management",
            "type": "ipv4",
            "ip_address": "192.0.2.11",
            "netmask": "255.255.255.0",
            "routes": [{"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "192.0.2.1"}],
        },
        {
            "link": "management",
            "type": "ipv6",
            "ip_address": "2001:db8::11",
            "netmask": "ffff:ffff:ffff:ffff::",
            "routes": [{"network": "::", "netmask": "::", "gateway": "fe80::1"}],
        },
    ],
    "services": [{"type": "dns", "address": "192.0.2.3"}, {"type": "ntp", "address": "192.0.2.4"}],
}


@pytest.fixture
def drive(tmp_path):
    """The root of a drive, as a directory; `put` writes files."""
    root = tmp_path / "drive"
    root.mkdir()

    def put(name, content):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    put("openstack/latest/network_data.json", NETWORK)
    return root, put


def read(root):
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return config_drive.read(descriptor)
    finally:
        os.close(descriptor)


def listed(*files, **more):
    return {"files": [{"path": path, "content_path": content} for path, content in files], **more}


def test_a_drive_of_nova_is_read(drive):
    root, put = drive
    put("openstack/content/0000", SETTINGS)
    put("openstack/latest/meta_data.json", listed(("/etc/amphora-agent/agent.conf", "/content/0000"), hostname="amp-1"))
    assert read(root) == DriveContent("amp-1", {"agent.conf": SETTINGS}, (), NETWORK)


def test_no_network_data_is_not_an_error(drive):
    root, put = drive
    (root / "openstack/latest/network_data.json").unlink()
    put("openstack/latest/meta_data.json", {})
    assert read(root).network == {}


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/etc/amphora-agent/../passwd",
        "/etc/amphora-agent/sub/agent.conf",
        "/etc/amphora-agent/",
        "/etc/amphora-agent/.hidden",
        "/etc/amphora-agent/..",
        "/etc/amphora-agent/a\nb",
        "/etc/amphora-agent/a\0b",
        "/etc/amphora-agent//agent.conf",
        "etc/amphora-agent/agent.conf",
        "/etc/amphora-agent/" + "a" * 65,
        "/etc/amphora-agent/authorized_keys",
        "",
    ],
)
def test_unknown_files_are_named_and_not_written(drive, path):
    root, put = drive
    put("openstack/content/0000", b"x")
    put("openstack/latest/meta_data.json", listed((path, "/content/0000")))
    told = read(root)
    assert told.files == {}
    assert told.skipped == (path,)


@pytest.mark.parametrize(
    "content_path", ["../../secret", "/content/../../../secret", "/content//0000", "/content/", "", "/content/\0", "."]
)
def test_misplaced_contents_are_refused(drive, content_path):
    root, put = drive
    (root.parent / "secret").write_text("not yours")
    put("openstack/content/0000", b"x")
    put("openstack/latest/meta_data.json", listed(("/etc/amphora-agent/agent.conf", content_path)))
    with pytest.raises(SettingsError):
        read(root)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_links_are_not_followed(drive, what):
    root, put = drive
    (root.parent / "0000").write_text("not yours")
    put("openstack/latest/meta_data.json", listed(("/etc/amphora-agent/agent.conf", "/content/0000")))
    if what == "file":
        (root / "openstack/content").mkdir()
        (root / "openstack/content/0000").symlink_to(root.parent / "0000")
    else:
        (root / "openstack/content").symlink_to(root.parent)
    with pytest.raises(SettingsError) as caught:
        read(root)
    assert "not yours" not in str(caught.value)


def test_the_reader_does_not_wait_for_a_pipe(drive):
    root, put = drive
    put("openstack/content/other", b"x")
    os.mkfifo(root / "openstack/content/0000")
    put("openstack/latest/meta_data.json", listed(("/etc/amphora-agent/agent.conf", "/content/0000")))
    with pytest.raises(SettingsError, match="it is not a file"):
        read(root)


def test_sizes_and_numbers_are_bounded(drive):
    root, put = drive
    put("openstack/content/0000", b"x" * (config_drive.LARGEST_FILE + 1))
    put("openstack/latest/meta_data.json", listed(("/etc/amphora-agent/agent.conf", "/content/0000")))
    with pytest.raises(SettingsError, match="more than"):
        read(root)
    put("openstack/latest/meta_data.json", listed(*[("/elsewhere", "/x")] * (config_drive.MOST_FILES + 1)))
    with pytest.raises(SettingsError, match="at most"):
        read(root)
    put("openstack/latest/meta_data.json", b" " * (config_drive.LARGEST_DOCUMENT + 1))
    with pytest.raises(SettingsError, match="more than"):
        read(root)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"files": 1}', b'{"files": [1]}', b'{"files": [{}]}']
)
def test_an_invalid_document_is_refused_and_not_quoted(drive, text):
    root, put = drive
    put("openstack/latest/meta_data.json", text)
    with pytest.raises(SettingsError):
        read(root)


@pytest.mark.parametrize("name", ["-x", "a" * 65, "a b", "a\nb", "../x", 1, None, "", {"a": 1}, "x.-y"])
def test_an_invalid_host_name_is_ignored(drive, name):
    root, put = drive
    put("openstack/latest/meta_data.json", {"hostname": name})
    assert read(root).hostname is None


def test_public_keys_are_one_line_each(drive):
    root, put = drive
    good = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI me@here"
    keys = {"a": good + "\n", "b": f"{good}\nssh-rsa more", "c": 'command="x" ' + good, "d": 7}
    put("openstack/latest/meta_data.json", {"public_keys": keys})
    assert read(root).files == {"authorized_keys": f"{good}\n".encode()}


# -- user data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (b"", False),
        (b" \n", False),
        (b"#cloud-config\nwrite_files: []\n", True),
        (b"#!/bin/sh\nreboot\n", True),
        (b"\xff\xfe", True),
        (b"{", True),
        (b"[" * 100_000, True),
        (b"[]", True),
        (b'{"write_files": []}', True),
        (b'{"amphora_files": {}}', False),
    ],
)
def test_other_user_data_are_ignored(drive, text, other):
    root, put = drive
    put("openstack/latest/meta_data.json", {})
    put("openstack/latest/user_data", text)
    told = read(root)
    assert (told.files, told.skipped, told.other_user_data) == ({}, (), other)


@pytest.mark.parametrize(
    "files",
    [
        [],
        1,
        None,
        {"agent.conf": 1},
        {"agent.conf": None},
        {"agent.conf": {"content": "secret"}},
        {"agent.conf": "secret \ud800"},
        {"agent.conf": "secret" * config_drive.LARGEST_FILE},
        {"agent.conf": "é" * (config_drive.LARGEST_FILE // 2 + 1)},
        dict.fromkeys(map(str, range(config_drive.MOST_FILES + 1)), "secret"),
    ],
)
def test_invalid_files_of_the_user_data_are_refused_and_not_quoted(drive, files):
    root, put = drive
    put("openstack/latest/meta_data.json", {})
    put("openstack/latest/user_data", {"amphora_files": files})
    with pytest.raises(SettingsError) as caught:
        read(root)
    assert "secret" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "../passwd",
        "/etc/passwd",
        "sub/agent.conf",
        "a\nb",
        "a\0b",
        "a" * 65,
        "authorized_keys",
    ],
)
def test_unknown_names_of_the_user_data_are_not_written(drive, name):
    root, put = drive
    put("openstack/latest/meta_data.json", {})
    put("openstack/latest/user_data", {"amphora_files": {name: "x", "agent.conf": "y"}})
    told = read(root)
    assert told.files == {"agent.conf": b"y"}
    assert told.skipped == (f"user_data: {name}",)


def test_both_places_have_files(drive):
    root, put = drive
    put("openstack/content/0000", SETTINGS)
    put("openstack/latest/meta_data.json", listed(("/etc/amphora-agent/agent.conf", "/content/0000")))
    put("openstack/latest/user_data", {"amphora_files": {"server.pem": "key"}})
    assert read(root).files == {"agent.conf": SETTINGS, "server.pem": b"key"}


def test_a_file_in_both_places_is_refused(drive):
    root, put = drive
    put("openstack/content/0000", SETTINGS)
    put("openstack/latest/meta_data.json", listed(("/etc/amphora-agent/agent.conf", "/content/0000")))
    put("openstack/latest/user_data", {"amphora_files": {"agent.conf": "other"}})
    with pytest.raises(SettingsError, match=r"agent\.conf is in meta_data.json and in user_data"):
        read(root)


def test_the_number_of_files_is_bounded_over_both_places(drive):
    root, put = drive
    half = config_drive.MOST_FILES // 2
    put("openstack/content/0000", b"x")
    put(
        "openstack/latest/meta_data.json",
        listed(*((f"/etc/amphora-agent/a{one}", "/content/0000") for one in range(half + 1))),
    )
    put("openstack/latest/user_data", {"amphora_files": {f"b{one}": "x" for one in range(half)}})
    with pytest.raises(SettingsError, match="more than"):
        read(root)


def test_user_data_that_are_no_file_of_a_bounded_size_are_refused(drive):
    root, put = drive
    put("openstack/latest/meta_data.json", {})
    put("openstack/latest/user_data", b" " * (config_drive.LARGEST_DOCUMENT + 1))
    with pytest.raises(SettingsError, match="more than"):
        read(root)
    (root / "openstack/latest/user_data").unlink()
    (root.parent / "elsewhere").write_text('{"amphora_files": {"agent.conf": "not yours"}}')
    (root / "openstack/latest/user_data").symlink_to(root.parent / "elsewhere")
    with pytest.raises(SettingsError):
        read(root)
    (root / "openstack/latest/user_data").unlink()
    os.mkfifo(root / "openstack/latest/user_data")
    with pytest.raises(SettingsError, match="it is not a file"):
        read(root)


# -- written files -----------------------------------------------------------------------------------------------------


def test_the_files_of_the_drive_are_written(tmp_path):
    places = Places(tmp_path)
    config_drive.write_files(places, DriveContent("amp-1", {"agent.conf": SETTINGS, "server.pem": b"key"}, (), NETWORK))
    found = {path.name: (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in places.files.iterdir()}
    assert found == {"agent.conf": (SETTINGS, 0o600), "server.pem": (b"key", 0o600)}
    assert stat.S_IMODE(places.files.stat().st_mode) == 0o700
    assert places.time_servers.read_text() == "server 192.0.2.4 iburst\n"
    assert stat.S_IMODE(places.network.stat().st_mode) == 0o644


def test_renewed_files_are_kept(tmp_path):
    places = Places(tmp_path)
    told = DriveContent(None, {"agent.conf": SETTINGS, "server.pem": b"old"}, (), {})
    config_drive.write_files(places, told)
    (places.files / "server.pem").write_bytes(b"renewed")
    config_drive.write_files(places, told)
    assert (places.files / "server.pem").read_bytes() == b"renewed"
    assert sorted(path.name for path in places.files.iterdir()) == ["agent.conf", "server.pem"]


def test_the_first_interface_uses_dhcp_without_network_data(tmp_path):
    places = Places(tmp_path)
    config_drive.write_files(places, DriveContent(None, {}, (), {}))
    assert places.network.read_text() == cloud_network.FALLBACK


# -- choice of the drive -----------------------------------------------------------------------------------------------


def iso(name):
    return bytes(32768) + b"\x01CD001\x01\x00" + b" " * 32 + name.encode().ljust(32) + bytes(1024)


def fat(kind, at, name):
    data = bytearray(34816)
    data[510:512] = b"\x55\xaa"
    struct.pack_into("8s", data, {43: 54, 71: 82}[at], kind)
    struct.pack_into("11s", data, at, name.ljust(11))
    return bytes(data)


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (iso("config-2"), ("iso9660", "config-2")),
        (fat(b"FAT12   ", 43, b"config-2"), ("vfat", "config-2")),
        (fat(b"FAT16   ", 43, b"CONFIG-2"), ("vfat", "CONFIG-2")),
        (fat(b"FAT32   ", 71, b"config-2"), ("vfat", "config-2")),
        (b"", None),
        (bytes(34816), None),
        (b"\xff" * 34816, None),
    ],
)
def test_labels_are_read(header, wanted):
    assert config_drive.label(header) == wanted


def test_the_drive_is_found_among_others(tmp_path):
    places = Places(tmp_path)
    places.devices.mkdir()
    for name, content in (("sr0", None), ("vda", bytes(4096)), ("vdb", iso("other")), ("vdc", iso("config-2"))):
        (places.blocks / name).mkdir(parents=True)
        if content is not None:
            (places.devices / name).write_bytes(content)
    assert config_drive.find(places, 0) == (places.devices / "vdc", "iso9660")


def test_a_missing_drive_is_reported(tmp_path):
    with pytest.raises(SettingsError, match="config-2"):
        config_drive.find(Places(tmp_path), 0)


def test_the_boot_argument_sets_the_time_limit():
    assert config_drive.wait_seconds("quiet amphora.wait=7.5 ro\n") == 7.5
    assert config_drive.wait_seconds("quiet amphora.wait=x") == config_drive.WAIT_SECONDS


def test_the_reader_imports_the_standard_library_only(tmp_path):
    """The reader runs as in the image: isolated, through a symbolic link."""
    link = tmp_path / "config-drive"
    link.symlink_to(Path(config_drive.__file__))
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='x'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, link], capture_output=True, text=True, check=True)
    assert "amphora_agent.cloud_network" in done.stdout.split()
    assert not {"jinja2", "flask", "pyroute2", "ssl"} & set(done.stdout.split())


# --- the network -------------------------------------------------------------------------------------------


def test_only_the_management_interface_is_configured():
    text = cloud_network.rendered(cloud_network.management(NETWORK, "192.0.2.11"))
    assert f"MACAddress={MAC}\n" in text
    assert "MTUBytes=1450\n" in text
    assert "Address=192.0.2.11/24\nAddress=2001:db8::11/64\nDHCP=no\nIPv6AcceptRA=no\n" in text
    assert "Destination=0.0.0.0/0\nGateway=192.0.2.1\n" in text
    assert "Destination=::/0\nGateway=fe80::1\n" in text
    assert OTHER_MAC not in text
    assert "198.51.100" not in text


@pytest.mark.parametrize(
    ("kind", "dhcp", "routers"),
    [
        ("ipv4_dhcp", "ipv4", "no"),
        ("ipv6_slaac", "no", "yes"),
        ("ipv6_dhcpv6-stateful", "ipv6", "yes"),
        ("something", "yes", "yes"),
    ],
)
def test_late_addresses_are_accepted(kind, dhcp, routers):
    document = {"links": [{"id": "a", "ethernet_mac_address": MAC}], "networks": [{"link": "a", "type": kind}]}
    text = cloud_network.rendered(cloud_network.management(document, None))
    assert f"DHCP={dhcp}\nIPv6AcceptRA={routers}\n" in text
    assert "MTUBytes" not in text


def test_older_formats_are_accepted():
    network = {"link": "a", "type": "ipv6", "ip_address": "2001:db8::1/64", "gateway": "2001:db8::f"}
    document = {"links": [{"id": "a", "ethernet_mac_address": MAC}], "networks": [network]}
    found = cloud_network.management(document, None)
    assert [str(address) for address in found.addresses] == ["2001:db8::1/64"]
    assert [(str(route.destination), str(route.gateway)) for route in found.routes] == [("::/0", "2001:db8::f")]
    assert cloud_network.management({}, None) is None


def link(**changes):
    return {"id": "a", "ethernet_mac_address": MAC, **changes}


def fixed(**changes):
    return {"link": "a", "type": "ipv4", "ip_address": "192.0.2.1", "netmask": "24", **changes}


@pytest.mark.parametrize(
    "document",
    [
        {"links": [link(ethernet_mac_address="52:54:00:00:00:11\n[Network]\nDHCP=yes")]},
        {"links": [link(ethernet_mac_address=None)]},
        {"links": [{}]},
        {"links": {"a": 1}},
        {"links": [1]},
        {"links": [link()] * 65},
        {"links": [link(mtu="1500\nx")]},
        {"links": [link(mtu=True)]},
        {"links": [link(mtu=1)]},
        {"links": [link()], "networks": [fixed(ip_address="192.0.2.1\nDNS=1.1.1.1")]},
        {"links": [link()], "networks": [fixed(netmask="255.0.255.0")]},
        {"links": [link()], "networks": [fixed(netmask="33")]},
        {"links": [link()], "networks": [fixed(ip_address=[])]},
        {"links": [link()], "networks": [fixed(gateway="here")]},
        {"links": [link()], "networks": [fixed(gateway="2001:db8::1")]},
        {"links": [link()], "networks": [fixed(routes=[{"network": "192.0.2.7", "netmask": "24", "gateway": "::1"}])]},
        {"links": [link()], "networks": [fixed(routes=[{}])]},
    ],
)
def test_a_hostile_network_is_refused(document):
    with pytest.raises(SettingsError):
        cloud_network.management(document, None)


def test_time_servers_are_addresses():
    services = [
        {"type": "ntp", "address": "192.0.2.1 iburst\nallow all"},
        1,
        {"type": "ntp"},
        {"type": "ntp", "address": "::1"},
    ]
    assert cloud_network.time_servers({"services": services}) == ("::1",)
    assert cloud_network.time_servers({"services": 1}) == ()
