# SPDX-License-Identifier: Apache-2.0
"""`amphoractl loadbalancer adopt`: plan, request, list, pause, resume and revert, with Octavia's real schema."""

import json
import socket
import threading

import migrated
import pytest
from cryptography.fernet import Fernet
from unit.adoption import octavia_rows
from unit.adoption.octavia_rows import AMPHORAE, LB, PORTS, VIP_ADDRESS, VIP_PORT
from unit.driver.octavia_objects import POOL, listener, load_balancer, pool
from unit.provider_agent.octavia_sockets import OctaviaSockets

from amphora_driver.adoption import commands
from amphora_driver.adoption import records as adoptions
from amphora_driver.adoption.records import Step
from amphora_driver.cli.command import Command, Lister
from amphora_driver.cli.main import COMMANDS
from amphora_driver.database.engine import Database

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def octavia(tmp_path):
    engine = octavia_rows.write_database(tmp_path / "octavia.sqlite")
    yield engine
    engine.dispose()


@pytest.fixture
def sockets(tmp_path):
    made = OctaviaSockets(tmp_path)
    tree = load_balancer(
        listeners=[listener(default_pool_id=POOL)], pools=[pool()], vip_address=VIP_ADDRESS, vip_port_id=VIP_PORT
    )
    made.trees[LB] = tree.to_dict(recurse=True, render_unsets=False)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    made = Database(url)
    yield made
    made.dispose()


@pytest.fixture
def adopt(tmp_path, database, amphoractl, octavia):
    (tmp_path / "keys").write_bytes(Fernet.generate_key())
    (tmp_path / "keys").chmod(0o600)
    names = "".join(f"{name}_socket = {tmp_path}/{name}.sock\n" for name in ("status", "stats", "get"))
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = {database.url}\nencryption_key_file = {tmp_path}/keys\n"
        f"[amp_queue]\nsocket_dir = {tmp_path}/bells\n"
        f"[amp_octavia]\n{names}"
        f"[amp_adoption]\noctavia_connection = {octavia.url}\n",
        encoding="utf-8",
    )
    return lambda *words: amphoractl(path, "loadbalancer", "adopt", *words)


def found(database):
    return {one.load_balancer_id: one for one in database.read(adoptions.list_adoptions)}


def test_each_command_is_installed(entry_points):
    installed = {target for _name, target in entry_points(COMMANDS) if "adoption" in target}
    own = [one for one in vars(commands).values() if isinstance(one, type) and one.__module__ == commands.__name__]
    assert installed == {f"{commands.__name__}:{one.__name__}" for one in own if issubclass(one, (Command, Lister))}


def test_the_plan_names_the_reason_against_the_embedded_network(adopt, sockets, octavia):
    before = octavia_rows.rows(octavia)
    status, said, _ = adopt("plan", LB, "-f", "json")
    assert status == 0
    ((refusal),) = json.loads(said)
    assert (refusal["Load balancer"], refusal["Step"]) == (LB, "refused")
    assert refusal["Action"] == "the network backend local cannot disable the ports of other amphorae"
    assert sockets.statuses == []
    assert octavia_rows.rows(octavia) == before


def test_the_plan_lists_the_actions(adopt, sockets, monkeypatch):
    monkeypatch.setattr("amphora_driver.adoption.planner.NEUTRON", "local")
    status, said, _ = adopt("plan", "--project", "demo", "-f", "json")
    actions = {one["Step"]: one["Action"] for one in json.loads(said)}
    assert (status, [*actions]) == (0, ["lock", "prepare", "take", "cut", "commit", "report", "keep", "remove"])
    assert PORTS[AMPHORAE[0]] in actions["cut"]
    assert sockets.statuses == []


def test_the_plan_of_an_unknown_load_balancer(adopt, sockets):
    status, said, _ = adopt("plan", "unknown", "-f", "json")
    (row,) = json.loads(said)
    assert status == 0
    assert "Octavia does not know it" in row["Action"]


def test_an_unusable_answer_of_the_driver_agent_is_a_refusal(adopt, sockets, tmp_path):
    """The answer begins with a length that is no number."""
    path = tmp_path / "get.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"none\n")
                connection.recv(65536)

        thread = threading.Thread(target=answer)
        thread.start()
        status, said, _ = adopt("plan", LB, "-f", "json")
        thread.join()
    (row,) = json.loads(said)
    assert (status, row["Step"]) == (0, "refused")
    assert "Check [amp_octavia] get_socket" in row["Action"]


def test_the_plan_needs_octavias_sockets(adopt):
    status, _, error = adopt("plan", LB)
    assert status == 1
    assert "a socket does not exist" in error


@pytest.mark.parametrize("words", [(), (LB, "--tag", "x"), ("--project", "p", "--tag", "x")])
def test_exactly_one_selection_is_necessary(adopt, words):
    status, _, error = adopt(*words)
    assert status == 1
    assert "exactly one of ID, --project and --tag is necessary" in error


def test_a_selection_without_a_load_balancer_is_refused(adopt, database):
    status, _, error = adopt("--tag", "wave-1")
    assert (status, found(database)) == (1, {})
    assert "no load balancer of the provider amphora has wave-1" in error


def test_a_request_is_recorded_once_and_reverted(adopt, database, octavia):
    octavia_rows.write(octavia, f"INSERT INTO tags (resource_id, tag) VALUES ('{LB}', 'wave-1')")
    status, said, _ = adopt("--tag", "wave-1", "--max-in-progress", "3", "--remove-after", "60")
    assert (status, said) == (0, "Recorded: 1. Follow it with: amphoractl loadbalancer adopt list\n")
    one = found(database)[LB]
    assert (one.step, one.max_in_progress, one.remove_after) == (Step.WAITING, 3, 60.0)
    status, _, error = adopt(LB)
    assert status == 1
    assert "its adoption is in progress" in error
    assert adopt("pause")[:2] == (0, "Paused: 1.\n")
    (row,) = json.loads(adopt("list", "-f", "json")[1])
    assert (row["Load balancer"], row["Step"], row["Paused"]) == (LB, "waiting", "yes")
    assert adopt("resume")[:2] == (0, "Resumed: 1.\n")
    assert adopt("revert", LB)[0] == 0
    assert json.loads(adopt("list", "-f", "json")[1]) == []
    (row,) = json.loads(adopt("list", "--all", "-f", "json")[1])
    assert (row["Step"], row["Reason"]) == ("reverted", "reverted before its start")
    assert adopt(LB)[0] == 0


def test_a_revert_without_an_adoption_is_refused(adopt):
    status, _, error = adopt("revert", LB)
    assert status == 1
    assert "there is none" in error
