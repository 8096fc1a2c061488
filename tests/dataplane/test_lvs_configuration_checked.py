# SPDX-License-Identifier: Apache-2.0
"""keepalived itself, and nftables, read what they would be given for virtual servers. Needs no IPVS.

What they do with it is tried inside a guest: tests/image/guest_lvs.py.
"""

from __future__ import annotations

import random
import subprocess
from ipaddress import ip_address
from uuid import UUID

import pytest

from amphora_agent.errors import KeepalivedError
from amphora_agent.keepalived.ipvs_config import Sync, render
from amphora_agent.keepalived.ipvs_process import verify
from amphora_agent.l4.model import ALGORITHMS, LARGEST_WEIGHT, Member, Persistence, VirtualServer
from amphora_agent.l4_ipvs import netlink, nft_rules
from amphora_agent.l4_ipvs.engine import LONGEST_PERSISTENCE, LvsEngine
from amphora_agent.l4_nftables import ruleset

pytestmark = pytest.mark.root
SEEDS = 24


def some_member(chance: random.Random, number: int) -> Member:
    host = f"2001:db8:2::{number:x}" if chance.random() < 0.4 else f"10.0.{number >> 8}.{number & 255}"
    weight = chance.choice((0, 1, chance.randint(1, LARGEST_WEIGHT)))
    return Member(
        str(UUID(int=chance.getrandbits(128))),
        ip_address(host),
        chance.randint(1, 65535),
        weight,
        chance.random() < 0.2,
        chance.random() < 0.9,
    )


def some_server(chance: random.Random, port: int) -> VirtualServer:
    vips = ["198.51.100.5", "198.51.100.6", "2001:db8::5", "2001:db8::6"]
    bound = Persistence(
        chance.choice((1, 360, LONGEST_PERSISTENCE)), chance.randint(1, 32), chance.choice((1, 64, 128))
    )
    return VirtualServer(
        id=str(UUID(int=chance.getrandbits(128))),
        protocol=chance.choice(("UDP", "SCTP")),
        port=port,
        addresses=tuple(map(ip_address, chance.sample(vips, chance.randint(1, 4)))),
        connection_limit=chance.choice((None, 1, 100000)),
        pool_id=None,
        algorithm=chance.choice(ALGORITHMS),
        persistence=chance.choice((None, bound)),
        client_address=chance.choice(("hidden", "preserved")),
        monitor=None,
        members=tuple(some_member(chance, number + 1) for number in range(chance.choice((0, 1, 2, 20)))),
    )


def some_servers(seed: int) -> list[VirtualServer]:
    chance = random.Random(seed)
    return [some_server(chance, port) for port in chance.sample(range(1, 65536), chance.randint(1, 6))]


def checked(tmp_path, text: str) -> None:
    file = tmp_path / "lvs.conf"
    file.write_text(text)
    verify(["keepalived", "-t", "-C", "-f", str(file)])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_keepalived_takes_it_without_a_word(seed, tmp_path):
    servers = some_servers(seed)
    LvsEngine(str(tmp_path)).check(servers)
    group = ip_address("239.192.1.2") if seed % 2 else ip_address("ff12::8000:1")
    checked(tmp_path, render(servers, tmp_path, Sync("lo", seed, group) if seed % 3 else None))


def test_a_thousand_members_are_read_soon(tmp_path):
    chance = random.Random(1)
    server = some_server(chance, 53)
    members = tuple(some_member(chance, number + 1) for number in range(1000))
    checked(tmp_path, render([VirtualServer(**{**vars(server), "members": members})], tmp_path))


def test_what_it_does_not_take_is_said_in_its_own_words(tmp_path):
    text = render(some_servers(3), tmp_path).replace("lvs_method NAT", "lvs_method NOT")
    with pytest.raises(KeepalivedError, match=r"lvs_method|NOT"):
        checked(tmp_path, text)


@pytest.fixture(scope="module")
def namespace():
    """One in which nobody minds rules."""
    process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize("seed", range(8))
def test_nftables_takes_the_rules_from_one_to_the_next(seed, namespace):
    before, after = (nft_rules.table_of(some_servers(seed + more)) for more in (0, 1))
    commands = [ruleset.exchange(ruleset.EMPTY, before), ruleset.exchange(before, after), ruleset.without()]
    text = "".join(commands)
    done = subprocess.run(
        ["nsenter", "-t", str(namespace), "-n", "nft", "-f", "-"],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_kernel_without_ipvs_says_so():
    if netlink.available():
        pytest.skip("this kernel has IPVS")
    with pytest.raises(netlink.NoIpvsError, match="nftables"):
        netlink.services()
