# SPDX-License-Identifier: Apache-2.0
"""The address of a server in its pool. Pure functions."""

from __future__ import annotations

import ipaddress

from amphora_cluster.model import Address, MemberTemplate, Server


def choose_address(server: Server, template: MemberTemplate) -> Address | str:
    """The address that the server's members get, or a text with the reason why there is none.

    The address has the template's family. With a subnet in the template it is in this subnet, otherwise it is the first
    one in Nova's order, which is the order of the server's interfaces.
    """
    of_family = [address for address in server.addresses if address.family == template.family]
    if not of_family:
        return f"The server has no fixed IPv{template.family} address."
    if template.subnet_id is None:
        return of_family[0]
    for address in of_family:
        if address.subnet_id == template.subnet_id:
            return address
    return f"The server has no fixed IPv{template.family} address in subnet {template.subnet_id}."


def canonical(ip: str) -> str:
    """The usual spelling of an IP address. Octavia keeps the spelling of the creating request."""
    # An IPv4 address has one spelling only, so the function does not parse IPv4 addresses. A pass over many members is
    # then three times as fast.
    if ":" not in ip:
        return ip
    try:
        return str(ipaddress.ip_address(ip))
    except ValueError:
        return ip
