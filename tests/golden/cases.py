# SPDX-License-Identifier: Apache-2.0
"""Load balancers, each of which has an expected text beside this file (`<name>.cfg`)."""

from __future__ import annotations

from amphora_driver.model.loadbalancer import HealthMonitor, Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.model.vocabulary import Algorithm, ListenerProtocol, MonitorType, PoolProtocol

LB = "1b000000-0000-4000-8000-000000000000"


def listener_id(number: int) -> str:
    return f"11500000-0000-4000-8000-{number:012d}"


def pool_id(number: int) -> str:
    return f"b0010000-0000-4000-8000-{number:012d}"


def member_id(number: int) -> str:
    return f"3e3b0000-0000-4000-8000-{number:012d}"


def vip(address: str = "198.51.100.5") -> Vip:
    return Vip(address=address, subnet_id="subnet", network_id="network", port_id="port")


def listener(number: int = 1, protocol: str = "HTTP", port: int = 80, pool: int | None = 1, **more) -> Listener:
    return Listener(
        id=listener_id(number),
        loadbalancer_id=LB,
        protocol=ListenerProtocol(protocol),
        protocol_port=port,
        default_pool_id=None if pool is None else pool_id(pool),
        **more,
    )


def pool(number: int = 1, protocol: str = "HTTP", members=(), monitor=None, **more) -> Pool:
    return Pool(
        id=pool_id(number),
        loadbalancer_id=LB,
        protocol=PoolProtocol(protocol),
        members=tuple(members),
        healthmonitor=monitor,
        **more,
    )


def member(number: int, address: str = "", **more) -> Member:
    address = address or f"192.0.2.{number}"
    more.setdefault("protocol_port", 8080)
    return Member(id=member_id(number), pool_id=pool_id(1), address=address, **more)


def monitor(kind: str = "HTTP", **more) -> HealthMonitor:
    more = {"delay": 5, "timeout": 3, "max_retries": 2, "max_retries_down": 3, **more}
    return HealthMonitor(id="4ea17400-0000-4000-8000-000000000001", pool_id=pool_id(1), type=MonitorType(kind), **more)


def balancer(listeners=(), pools=(), **more) -> LoadBalancer:
    more.setdefault("vip", vip())
    return LoadBalancer(id=LB, project_id="project", listeners=tuple(listeners), pools=tuple(pools), **more)


CASES: dict[str, LoadBalancer] = {
    "http": balancer([listener()], [pool(members=[member(1), member(2)])]),
    "http_monitor": balancer(
        [listener()],
        [
            pool(
                monitor=monitor(
                    http_method="HEAD",
                    url_path="/health?q='\"#$HOME\\%[x]",
                    expected_codes="200, 202-204",
                    http_version=1.1,
                    domain_name="www.example.com",
                ),
                members=[
                    member(1, weight=10),
                    member(2, weight=0),
                    member(3, backup=True),
                    member(4, admin_state_up=False),
                    member(5, monitor_address="192.0.2.99", monitor_port=9000),
                    member(6, "2001:db8:0:0::6", monitor_address="2001:DB8::99"),
                ],
            )
        ],
    ),
    "http_monitor_defaults": balancer([listener()], [pool(monitor=monitor(), members=[member(1)])]),
    "monitor_disabled": balancer(
        [listener()],
        [pool(monitor=monitor(admin_state_up=False), members=[member(1, monitor_port=9000)])],
    ),
    "tcp": balancer(
        [
            listener(
                protocol="TCP",
                port=5432,
                connection_limit=200,
                timeout_client_data=1000,
                timeout_member_connect=2000,
                timeout_member_data=3000,
                timeout_tcp_inspect=4000,
            )
        ],
        [
            pool(
                protocol="TCP",
                lb_algorithm=Algorithm.LEAST_CONNECTIONS,
                monitor=monitor("TCP"),
                members=[member(1), member(2)],
            )
        ],
    ),
    "source_ip": balancer(
        [listener()],
        [pool(lb_algorithm=Algorithm.SOURCE_IP, members=[member(1), member(2), member(3)])],
    ),
    "https_pass_through": balancer(
        [listener(protocol="HTTPS", port=443)],
        [pool(protocol="HTTPS", monitor=monitor("TCP"), members=[member(1, protocol_port=443)])],
    ),
    "dual_stack": balancer(
        [listener()],
        [pool(members=[member(1), member(2, "2001:db8::2")])],
        vip=vip("2001:db8:0::5"),
        additional_vips=(vip("198.51.100.6"),),
    ),
    "shared_pool": balancer(
        [listener(1), listener(2, port=8080, timeout_member_data=1000), listener(3, "TCP", port=9090)],
        [pool(monitor=monitor("TCP"), members=[member(1)])],
    ),
    "switched_off": balancer(
        [
            listener(1, admin_state_up=False),
            listener(2, port=81, pool=2),
            listener(3, port=82, pool=None),
            listener(4, "TCP", port=83, pool=None),
        ],
        [pool(1, members=[member(1)]), pool(2, members=[member(2)], admin_state_up=False)],
    ),
    "empty_pool": balancer([listener()], [pool(monitor=monitor())]),
}
