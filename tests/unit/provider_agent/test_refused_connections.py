# SPDX-License-Identifier: Apache-2.0
"""A refused connection to Octavia leaves no open socket for the garbage collector."""

import gc
import socket
import warnings

import pytest
from octavia_lib.api.drivers.driver_lib import DriverLibrary
from octavia_lib.api.drivers.exceptions import DriverError


def test_a_refused_connection_leaves_no_socket_open(tmp_path):
    place = str(tmp_path / "octavia.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(place)  # without a listening process
        library = DriverLibrary(status_socket=place, stats_socket=place, get_socket=place)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(DriverError) as caught:
                library.get_loadbalancer("lb")
            # The error refers to the frames of octavia_lib, and these to the socket.
            del caught
            gc.collect()
    assert [str(each.message) for each in said] == []
