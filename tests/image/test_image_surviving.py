# SPDX-License-Identifier: Apache-2.0
"""A guest recovers after a kill of each of its daemons, and after its own reboot."""

import pytest
from balanced import listener, load_balancer, member, monitor, pool
from guest_lab import BOOT_SECONDS

pytestmark = [
    pytest.mark.root,
    pytest.mark.extended,
    pytest.mark.quiet,
    pytest.mark.everything,
    pytest.mark.lasts(1800),
]
ONE, TWO = "198.51.100.113", "198.51.100.114"


@pytest.fixture
def serving(balanced):
    """A guest that serves HTTP and UDP with two members each."""
    web = [balanced.web("one", ONE), balanced.web("two", TWO)]
    udp = [balanced.udp("one", ONE), balanced.udp("two", TWO)]
    quick = {"delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}
    tree = load_balancer(
        listener(80, pool="web"),
        listener(53, pool="udp", protocol="UDP"),
        pool("web", *map(member, web), monitor=monitor("HTTP", url_path="/health", expected_codes="200")),
        pool("udp", *map(member, udp), protocol="UDP", monitor=monitor("UDP-CONNECT", **quick)),
    )
    balanced.push(tree)
    balanced.tree, balanced.udp_members = tree, udp
    balanced.until(lambda: serves_all(balanced), "both protocols serve")
    return balanced


def serves_all(balanced) -> bool:
    return balanced.serves() and balanced.datagram() in {"one", "two"}


UNITS = ("amphora-haproxy", "amphora-agent", "amphora-checker", "amphora-responder", "amphora-health-watcher")


@pytest.mark.parametrize("unit", UNITS)
def test_a_killed_daemon_restarts_alone(first, serving, unit):
    before = {one: first.pids(one) for one in UNITS}
    main = {one: first.main_pid(one) for one in UNITS}
    assert all(main[one] in before[one] for one in UNITS), (main, before)
    first.kill(unit)
    serving.until(lambda: (now := first.pids(unit)) and not now & before[unit], f"{unit} runs again")
    serving.until(lambda: serves_all(serving), "both protocols serve")
    serving.until(first.answers, "the agent answers")
    # Other processes of a unit may be short-lived.
    assert {one: first.main_pid(one) for one in UNITS if one != unit} == {k: v for k, v in main.items() if k != unit}
    if unit != "amphora-haproxy":
        assert first.pids("amphora-haproxy") == before["amphora-haproxy"]


def test_a_restarted_agent_loads_its_confirmed_bundle(first, serving):
    told = first.call("GET", "/v2/info")[1]
    first.run("systemctl", "restart", "amphora-agent.service")
    serving.until(first.answers, "the agent answers")
    again = first.call("GET", "/v2/info")[1]
    assert again["generation"] == told["generation"]
    assert serves_all(serving)


def test_a_member_that_fails_without_the_agent_gets_no_traffic(first, serving):
    first.run("systemctl", "stop", "amphora-agent.service")
    try:
        serving.udp_members[0].close()
        serving.until(lambda: {serving.datagram() for _ in range(8)} == {"two"}, "the second member gets all datagrams")
    finally:
        first.run("systemctl", "start", "amphora-agent.service")
    serving.until(first.answers, "the agent answers")


def test_a_rebooted_guest_serves_again(first, serving, record_property):
    """No push is needed: the disk has the confirmed bundle, and the config drive has the files."""
    before = first.run("cat", "/proc/sys/kernel/random/boot_id")
    process = first.process()
    first.run("systemctl", "--no-block", "reboot", check=False)
    serving.until(lambda: not first.answers(), "the guest stops")
    began = first.rebooting()
    first.await_agent(BOOT_SECONDS)
    serving.until(lambda: serves_all(serving), "both protocols serve")
    record_property("reboot to serving, seconds", began())
    assert first.run("cat", "/proc/sys/kernel/random/boot_id") != before
    assert first.process() == process


def test_a_guest_serves_again_after_a_power_cut(first, serving, guest_lab):
    first.disconnect()
    guest_lab.compute.power_off(first.id)
    assert guest_lab.compute.power_on(first.id)
    assert not guest_lab.compute.power_on(first.id)
    first.rebooting()
    first.await_agent(BOOT_SECONDS)
    serving.until(lambda: serves_all(serving), "both protocols serve")
