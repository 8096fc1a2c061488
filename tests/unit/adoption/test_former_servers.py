# SPDX-License-Identifier: Apache-2.0
"""Only a server with the name of a former amphora is deleted. Nova is a list of answers."""

import pytest

from amphora_driver.adoption.cloud import FormerServers
from amphora_driver.openstack.errors import ApiError


class Service:
    """Answers as Nova does, and keeps the ids of deleted servers."""

    def __init__(self, names):
        self.names, self.deleted = names, []

    def request(self, method, path, **_more):
        server_id = path.removeprefix("/servers/")
        if server_id not in self.names:
            raise ApiError(f"{method} {path}", 404, "itemNotFound", "there is no such server")
        if method == "DELETE":
            self.deleted.append(server_id)
            return None
        return {"server": {"id": server_id, "name": self.names[server_id]}}


@pytest.mark.parametrize(
    ("server_id", "is_deleted"),
    [("mine", True), ("other", False), ("missing", False)],
    ids=["mine", "other", "missing"],
)
def test_only_a_server_with_the_name_is_deleted(server_id, is_deleted, caplog):
    service = Service({"mine": "amphora-1", "other": "database"})
    assert FormerServers(service, 100).delete_named(server_id, "amphora-1") is is_deleted
    assert service.deleted == ([server_id] if is_deleted else [])
    assert ("does not have the name amphora-1" in caplog.text) is (server_id == "other")
