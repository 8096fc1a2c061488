# SPDX-License-Identifier: Apache-2.0
"""Requests to the hypervisor of the tests (`hypervisor.py`). Only the standard library: services import this module."""

import json
import socket

_SECONDS = 120.0


class RefusedError(Exception):
    """The hypervisor could not do what a request asks for."""


def ask(path, verb, **request):
    """Send a request to the socket at this path; return the answer after the work is done."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(str(path))
        connection.sendall(json.dumps({"verb": verb, **request}).encode())
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            told = json.load(answer)
    if "error" in told:
        raise RefusedError(told["error"])
    return told
