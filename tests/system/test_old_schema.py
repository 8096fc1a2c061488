# SPDX-License-Identifier: Apache-2.0
"""A database without a revision: services refuse it with a message, and continue after the upgrade."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openstack.exceptions import HttpException

from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database

pytestmark = [pytest.mark.root, pytest.mark.extended]

SERVICES = ("amphora-controller", "amphora-health-manager")
OTHERS = ("octavia-api", "octavia-driver-agent")
SENTENCE = "the database has no schema"


def remove_revision(url):
    """Remove the recorded revision; the tables and their rows stay."""
    database = Database(url)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE alembic_version")
    database.dispose()


def amphoractl(settings, *words):
    done = subprocess.run(
        [Path(sys.executable).with_name("amphoractl"), *words, "-f", "json"],
        env={**os.environ, **settings.environment()},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_an_old_database_is_refused_upgraded_and_served(cloud, stack, settings):
    balancer = cloud.served("old", ("member1",))
    before = cloud.amphorae(balancer)
    pool, listener = cloud.pool_of(balancer), cloud.listener_of(balancer)
    programs = {program.name: program for program in stack.programs()}
    supervision = stack.supervision
    try:
        for name in (*SERVICES, *OTHERS):
            supervision.stop(name)
        remove_revision(settings.database_url)
        for name in SERVICES:
            supervision.start(programs[name])
            cloud.until(lambda name=name: supervision.running(name) is None, f"{name} has ended")
            assert SENTENCE in supervision.tail(name)
            assert "amphoractl database upgrade" in supervision.tail(name)
        supervision.start(programs["octavia-api"])
        supervision.wait_ready(programs["octavia-api"], 60.0)
        with pytest.raises(HttpException, match="could not use its database") as refused:
            cloud.balancers.update_listener(listener, name="renamed")
        # The operator finds the reason in the log by the reference in the user's message.
        reference = str(refused.value).split("this reference: ")[1][:8]
        log = supervision.log("octavia-api").read_text(encoding="utf-8")
        assert any(reference in line and SENTENCE in line for line in log.splitlines())
        assert amphoractl(settings, "database", "status")["Schema"] == ""
        newest = schema_check.known_revisions()[-1]
        assert amphoractl(settings, "database", "upgrade") == {"Before": "", "After": newest, "Contract migrations": ""}
    finally:
        stack.up()
    # The same API process has checked the schema again.
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    cloud.active(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
    assert cloud.amphorae(balancer) == before
    lines = amphoractl(settings, "loadbalancer", "history", balancer.id)
    calls = [row["Event"] for row in lines if not row["Event"].startswith("applied")]
    assert calls == ["create member", "create loadbalancer"], "the history is complete"
    cloud.until(lambda: amphoractl(settings, "job", "list") == [], "no job is pending")
