# SPDX-License-Identifier: Apache-2.0
"""A connection to Octavia that is refused leaves nothing for the garbage collector to find in another test."""

import gc
import socket
import warnings

import pytest
from octavia_lib.api.drivers.driver_lib import DriverLibrary
from octavia_lib.api.drivers.exceptions import DriverError


def test_a_refused_connection_leaves_no_socket_open(tmp_path):
    place = str(tmp_path / "octavia.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(place)  # and nothing listens
        library = DriverLibrary(status_socket=place, stats_socket=place, get_socket=place)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(DriverError) as caught:
                library.get_loadbalancer("lb")
            # What holds the error holds the frames of octavia_lib, and these the socket.
            del caught
            gc.collect()
    assert [str(each.message) for each in said] == []
