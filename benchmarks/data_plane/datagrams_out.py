# SPDX-License-Identifier: Apache-2.0
"""A program that sends datagrams as fast as it can, and prints the number sent and its processor time.

    datagrams_out.py ADDRESS PORT SECONDS KIND

The kernel forwards a datagram within the processor time of the sender: the packet passes all namespaces before
sendmmsg(2) returns. KIND is `packets` (64 bytes, on 64 flows), `bulk` (1,200 bytes, on one flow), `segments` (the same
with generic segmentation offload) or `flows` (each datagram is a new flow).
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import time

_FLOWS, _BATCH = 64, 32
_SOL_UDP, _UDP_SEGMENT = 17, 103
_SEGMENT, _SEGMENTS = 1200, 48
_MOST_FLOWS = 3000


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("vectors", ctypes.POINTER(_IoVec)),
        ("vector_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint))


def _packets(place: tuple[str, int], until: float, flow_count: int = _FLOWS, length: int = 64) -> int:
    data = ctypes.create_string_buffer(length)
    vector = _IoVec(ctypes.cast(data, ctypes.c_void_p), length)
    messages = (_Message * _BATCH)()
    for each in messages:
        each.header.vectors, each.header.vector_count = ctypes.pointer(vector), 1
    send = ctypes.CDLL(None, use_errno=True).sendmmsg
    flows = [_flow(place) for _ in range(flow_count)]
    sent = 0
    while time.monotonic() < until:
        for flow in flows:
            sent += max(0, send(flow.fileno(), messages, _BATCH, 0))
    return sent


def _bulk(place: tuple[str, int], until: float) -> int:
    return _packets(place, until, 1, _SEGMENT)


def _segments(place: tuple[str, int], until: float) -> int:
    flow = _flow(place)
    flow.setsockopt(_SOL_UDP, _UDP_SEGMENT, _SEGMENT)
    data = b"x" * (_SEGMENT * _SEGMENTS)
    sent = 0
    while time.monotonic() < until:
        flow.send(data)
        sent += _SEGMENTS
    return sent


def _new_flows(place: tuple[str, int], until: float) -> int:
    sent = 0
    while time.monotonic() < until and sent < _MOST_FLOWS:
        with _flow(place) as flow:
            flow.send(b"x" * 64)
        sent += 1
    return sent


def _flow(place: tuple[str, int]) -> socket.socket:
    flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    flow.connect(place)
    return flow


def main() -> None:
    address, port, seconds, kind = sys.argv[1:]
    send = {"packets": _packets, "bulk": _bulk, "segments": _segments, "flows": _new_flows}[kind]
    begun, used = time.monotonic(), time.process_time()
    sent = send((address, int(port)), begun + float(seconds))
    answer = {"sent": sent, "seconds": time.monotonic() - begun, "cpu": time.process_time() - used}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
