# SPDX-License-Identifier: Apache-2.0
"""The status page of a running stack, in a browser."""

import http.client
import json
from urllib.parse import urlsplit

import pytest
from browser import browsing
from free_ports import free_ports

from amphora_driver import config
from amphora_driver.host import namespaces
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.telemetry.http_server import Telemetry
from sandbox import config_files

pytestmark = pytest.mark.root

PORT = config_files.STATUS_PORT
HEALTH_PORT = 9877
ADDRESS = f"http://127.0.0.1:{PORT}/"
HOSTILE = "</title><script>window.hostile = 1</script><img src=x onerror='window.hostile = 2'>"


def asked(settings, path, port=PORT):
    """Return the answer to a program on the controller's host."""

    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return namespaces.run_inside(namespaces.path(settings.control), ask)


def sample(settings, name, port=PORT, path="/metrics/process"):
    """Return the value of one series."""
    lines = asked(settings, path, port)[1].splitlines()
    found = [line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")]
    assert len(found) == 1, f"{name} has {len(found)} samples"
    return float(found[0])


def status(settings):
    return json.loads(asked(settings, "/status.json")[1])


@pytest.fixture
def page(settings):
    with browsing(namespaces.path(settings.control)) as one:
        yield one


@pytest.mark.extended
def test_a_fail_over_appears_on_an_open_page(cloud, settings, page):
    balancer = cloud.served(HOSTILE)
    before = cloud.amphorae(balancer)
    page.visit(ADDRESS)
    assert balancer.id in page.text("[data-part=balancers]")
    assert "There are no recent fail-overs." in page.text() or balancer.id not in page.text("[data-part=failovers]")
    assert sample(settings, "amphora_apply_seconds_count") >= 1
    assert sample(settings, 'amphora_pushes_total{how="start"}') >= 1
    cloud.balancers.failover_load_balancer(balancer.id)
    cloud.active(balancer.id)
    # The page's script updates it without a reload.
    cloud.until(
        lambda: page.says(
            "[...document.querySelectorAll('[data-part=failovers] tbody tr')]"
            f".some((row) => row.innerText.includes('{balancer.id}') && row.innerText.includes('done'))"
        ),
        "the page shows the completed fail-over",
    )
    row = next(one for one in status(settings)["fleet"]["failovers"] if one["load_balancer_id"] == balancer.id)
    assert row["cause"] == "asked"
    assert row["amphora_id"] in before
    assert row["begun_at"] <= row["served_at"] <= row["ended_at"]
    # Hostile text is shown literally and is never interpreted.
    assert HOSTILE in page.text("[data-part=balancers]")
    assert page.says("window.hostile") is None
    assert page.says("document.querySelectorAll('img').length + document.querySelectorAll('script').length") == 1
    assert page.complaints == []
    assert {urlsplit(one).netloc for one in page.requests if not one.startswith("data:")} == {f"127.0.0.1:{PORT}"}


def test_the_page_shows_the_same_without_scripts(cloud, settings, page):
    balancer = cloud.served("plain")
    told = asked(settings, "/")[1]
    assert balancer.id in told
    assert "plain" in told
    cloud.until(lambda: "plain" in asked(settings, "/?q=plain")[1], "the search finds the load balancer")
    assert balancer.id not in asked(settings, "/?q=another-one")[1]


def test_numbers_of_both_processes(cloud, settings):
    cloud.served("counted")
    cloud.until(
        lambda: sample(settings, "amphora_heartbeats_received_total", HEALTH_PORT) > 0, "heartbeats are counted"
    )
    cloud.until(
        lambda: sample(settings, 'amphora_fleet_load_balancers{status="ACTIVE"}', path="/metrics/fleet") == 1,
        "one load balancer is counted",
    )
    for port in (PORT, HEALTH_PORT):
        assert sample(settings, "amphora_fleet_up", port, "/metrics") == 1
        assert sample(settings, 'amphora_fleet_amphorae{state="ready"}', port, "/metrics") == 1
        assert sample(settings, "amphora_fleet_amphorae_outdated", port, "/metrics") == 0
        assert asked(settings, "/healthz", port) == (200, "ok\n")
    assert sample(settings, 'amphora_step_seconds_count{step="Push"}') >= 1
    assert sample(settings, 'amphora_jobs_total{outcome="finished"}') >= 1
    assert sample(settings, "amphora_fleet_certificate_expiry_seconds", path="/metrics/fleet") > 0


def test_log_lines_of_a_job_contain_its_ids(cloud, settings, stack):
    balancer = cloud.served("logged")
    (amphora,) = cloud.amphorae(balancer)
    text = stack.supervision.log("amphora-controller").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if f"amphora {amphora} now serves generation" in line]
    assert lines
    assert f"[lb={balancer.id} amphora={amphora} gen=" in lines[0]
    steps = [line for line in text.splitlines() if f" load balancer {balancer.id}: " in line and ".executor " in line]
    assert steps
    assert all(f"[lb={balancer.id} gen=" in line for line in steps)


def test_only_the_token_grants_access(settings, tmp_path):
    (free_port,) = free_ports(1)
    conf = config.load([str(settings.driver_configuration)])
    token = tmp_path / "token"
    token.write_text("correct horse\n", encoding="utf-8")
    token.chmod(0o600)
    conf.set_override("token_file", str(token), "amp_status_page")
    conf.set_override("bind_port", free_port, "amp_status_page")
    address = f"http://127.0.0.1:{free_port}/"
    with Telemetry(conf, ProcessKind.CONTROLLER, "of-a-test", lambda: True) as telemetry:
        assert telemetry.server.wait_until_listening(30)
        with browsing(password="correct horse") as friend:
            friend.visit(address)
            assert "amphorae" in friend.says("document.title")
            # The script's own requests are authorised too.
            found = friend.says("fetch('page.json').then((answer) => answer.status)")
            assert found == 200
            # The browser reports the first answer (401) in its console.
            assert [one for one in friend.complaints if "401" not in json.dumps(one)] == []
        with browsing() as stranger:
            stranger.visit(address)
            assert "amphorae" not in stranger.says("document.title")
            assert stranger.says("document.querySelector('main')") is None
