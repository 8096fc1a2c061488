# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: a path without a mounted namespace."""

import pytest

from amphora_driver.host import namespaces
from amphora_driver.network import bridges


def test_a_file_without_a_mounted_namespace_is_no_namespace(tmp_path):
    """The supervisor of an amphora creates the file a moment before it mounts the namespace there."""
    file = tmp_path / "amphora-haproxy"
    file.touch()
    with pytest.raises(FileNotFoundError):
        namespaces.run_inside(file, lambda: None)
    assert not bridges.has_mac(file, "fa:16:3e:00:00:01")
