# SPDX-License-Identifier: Apache-2.0
"""Two guests: SCTP between them, and a VIP takeover from one to the other."""

import json
import time

import pytest
from balanced import ADVERT, VIP, VIP6, listener, load_balancer, member, monitor, pool
from wanted import id_of

from amphora_driver.model.loadbalancer import Member

pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.quiet, pytest.mark.lasts(2400)]
WEB, UDP = "198.51.100.115", "198.51.100.116"
# Addresses that no member uses. Ports get addresses below 200.
SCTP_MEMBERS, SCTP_PORT = {"red": "198.51.100.218", "blue": "198.51.100.219"}, 3868
# Linux's socket(7) with IPPROTO_SCTP: one association, one message each way.
_SERVER = (
    "import socket, sys\n"
    "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)\n"
    f"s.bind((sys.argv[2], {SCTP_PORT})); s.listen(8)\n"
    "while True:\n"
    "    c, _ = s.accept(); c.recv(100); c.sendall(sys.argv[1].encode()); c.close()\n"
)
_CLIENT = (
    "import socket\n"
    "for _ in range(6):\n"
    "    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132); s.settimeout(5)\n"
    "    try:\n"
    f"        s.connect(('{VIP}', {SCTP_PORT})); s.sendall(b'name'); print(s.recv(100).decode())\n"
    "    except OSError as error:\n"
    "        print(error)\n"
    "    s.close()\n"
)


# --- a resumed guest ---------------------------------------------------------------------------------------


def test_resumed_guest_has_its_own_identity(second, why_cold, record_property):
    record_property("from a frozen guest to its agent, seconds", round(second.booted_after, 1))
    assert not why_cold or "KVM" in why_cold
    assert second.call("GET", "/v2/info")[1]["amphora_id"] == second.id
    assert second.run("hostname").strip() == f"amphora-{second.id}"
    # Certificates need a correct clock, not that of the saved guest. The hardware clock has whole seconds, and an
    # emulated guest may be late to read it.
    before, said, after = time.time(), float(second.run("date", "+%s.%N")), time.time()
    assert before - 5 < said < after + 5
    assert second.run("systemctl", "--failed", "--plain", "--no-legend", check=False).strip() == ""


@pytest.mark.everything
def test_two_guests_resumed_from_one_state_share_no_secret(guest_lab, second, another):
    third = another()
    try:
        drawn = [guest.run("head", "-c", "16", "/dev/urandom") for guest in (second, third)]
        assert drawn[0] != drawn[1]
        assert third.run("hostname").strip() == f"amphora-{third.id}"
    finally:
        third.disconnect()
        guest_lab.guests.remove(third)
        guest_lab.compute.destroy(third.id)


# --- SCTP --------------------------------------------------------------------------------------------------


class Neighbour:
    """SCTP members in the second guest, because the machine's own kernel may lack SCTP."""

    def __init__(self, guest) -> None:
        self.guest = guest
        listed = json.loads(guest.run("ip", "-j", "link"))
        mac = guest.plugged[0].port.mac
        (self.link,) = (link["ifname"] for link in listed if link.get("address") == mac)
        for address in SCTP_MEMBERS.values():
            guest.run("ip", "addr", "replace", f"{address}/24", "dev", self.link)
        guest.run("ip", "link", "set", self.link, "up")
        guest.run("modprobe", "sctp")
        for name in SCTP_MEMBERS:
            self.start(name)

    def start(self, name: str) -> None:
        argv = ("python3", "-c", _SERVER, name, SCTP_MEMBERS[name])
        self.guest.run("systemd-run", "--collect", f"--unit=sctp-{name}", *argv)

    def stop(self, name: str) -> None:
        self.guest.run("systemctl", "stop", f"sctp-{name}", check=False)

    def hears(self) -> set[str]:
        """Return the members that answer associations with the VIP."""
        return set(self.guest.run("python3", "-c", _CLIENT).split("\n")[:-1])

    def close(self) -> None:
        for name in SCTP_MEMBERS:
            self.stop(name)
        self.guest.run("ip", "addr", "flush", "dev", self.link)


@pytest.fixture
def neighbour(second):
    made = Neighbour(second)
    yield made
    made.close()


def test_sctp_associations_reach_healthy_members_only(first, neighbour, balanced):
    members = [
        Member(id=id_of("member", name), pool_id="", address=address, protocol_port=SCTP_PORT)
        for name, address in SCTP_MEMBERS.items()
    ]
    quick = {"delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}
    tree = load_balancer(
        listener(SCTP_PORT, pool="sctp", protocol="SCTP"),
        pool("sctp", *members, protocol="SCTP", monitor=monitor("SCTP", **quick)),
    )
    balanced.push(tree)
    balanced.until(lambda: neighbour.hears() == {"red", "blue"}, "both members answer")
    neighbour.stop("red")
    balanced.until(lambda: neighbour.hears() == {"blue"}, "the blue member answers alone")
    neighbour.start("red")
    balanced.until(lambda: neighbour.hears() == {"red", "blue"}, "both members answer")


# --- a pair ------------------------------------------------------------------------------------------------


def holders(pair) -> list:
    return [guest for guest in pair.guests if VIP in guest.inner("ip", "-j", "addr", "show", check=False)]


def test_the_partner_of_a_powered_off_guest_takes_the_vips(pair, guest_lab, record_property):
    web, udp = pair.web("web", WEB, 8080), pair.udp("udp", UDP)
    tree = load_balancer(
        listener(80, pool="web"),
        listener(53, pool="udp", protocol="UDP"),
        pool("web", member(web), monitor=monitor("HTTP", url_path="/health", expected_codes="200")),
        pool("udp", member(udp), protocol="UDP"),
    )
    pair.push(tree)
    pair.until(lambda: len(holders(pair)) == 1, "one guest has the VIPs")
    pair.until(lambda: pair.serves() and pair.datagram() == "udp", "the pair serves")
    (master,) = holders(pair)
    (standby,) = (guest for guest in pair.guests if guest is not master)

    before = standby.pids("amphora-keepalived")
    assert before
    standby.kill("amphora-keepalived")
    pair.until(lambda: (now := standby.pids("amphora-keepalived")) and not now & before, "keepalived runs again")
    assert holders(pair) == [master]

    master.disconnect()
    guest_lab.compute.power_off(master.id)
    since = master.rebooting()
    pair.until(lambda: pair.serves() and pair.datagram() == "udp", "the partner serves")
    taken = since()
    record_property("power cut to served by the partner, seconds", taken)
    # RFC 9568 6.1: three advertisements and the skew; the rest is for a machine that emulates both.
    assert taken < 4 * ADVERT + 30
    pair.until(lambda: pair.serves(address=VIP6), "the partner serves IPv6")
    assert json.loads(standby.inner("ip", "-j", "addr", "show", "to", VIP))


@pytest.mark.everything
def test_a_restarted_guest_rejoins_the_pair(first, second, pair, guest_lab):
    """The powered-off guest boots cold from its own disk and rejoins the pair without a push."""
    gone = [guest for guest in pair.guests if guest.process() is None]
    for guest in gone:
        assert guest_lab.compute.power_on(guest.id)
        guest.rebooting()
        guest.await_agent()
        pair.until(lambda one=guest: one.pids("amphora-keepalived"), "keepalived runs")
    assert gone
    pair.until(lambda: len(holders(pair)) == 1, "one guest has the VIPs")
    pair.web("web", WEB, 8080)
    pair.until(pair.serves, "the pair serves")
