# SPDX-License-Identifier: Apache-2.0
"""Connects the taps of Nova's libvirt driver with the switch, as the agent of a compute host does: tap_agent.py SOCKET.

It runs in the namespace of the switch, where nova-compute makes a tap for each port. SOCKET is that of the hypervisor.
"""

import socket
import sys
import traceback

from plugins import lab_socket
from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import RTMGRP_LINK

READY = "waiting for taps"
_VERBS = {"RTM_NEWLINK": "plug_tap", "RTM_DELLINK": "forget_tap"}


def main():
    """Report each new tap and each removed one to the hypervisor, until killed."""
    known = set()
    with IPRoute() as kernel:
        kernel.bind(RTMGRP_LINK)
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        while True:
            for message in kernel.get():
                name, verb = message.get_attr("IFLA_IFNAME"), _VERBS.get(message["event"])
                # Bridges report their ports with a family of their own.
                if not verb or message["family"] != socket.AF_UNSPEC or not name.startswith("tap"):
                    continue
                # The kernel reports each change of an interface as a new one.
                if (name in known) == (verb == "plug_tap"):
                    continue
                known ^= {name}
                try:
                    lab_socket.ask(sys.argv[1], verb, name=name)
                except (OSError, lab_socket.RefusedError):
                    traceback.print_exc()


if __name__ == "__main__":
    main()
