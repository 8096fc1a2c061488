# SPDX-License-Identifier: Apache-2.0
"""Backends: found by name, created once, and independent of unavailable ones."""

import threading

import pytest
from installed import package
from stevedore import _cache

from amphora_driver import config, installation
from amphora_driver.database.engine import Database
from amphora_driver.errors import ConfigurationError
from amphora_driver.plugins import COMPUTE, NETWORK, TOPOLOGY, Catalogue

SOURCE = """
    from amphora_driver.compute.netns import NetnsCompute
    from amphora_driver.network.local import LocalNetwork

    broken = True


    class Elsewhere(LocalNetwork):
        wiring = "elsewhere"


    class Images(NetnsCompute):
        supports = NetnsCompute.supports | {"amp_image_tag"}


    class Fragile:
        supports = frozenset()
        wiring = "bridge"

        def __init__(self, conf, network):
            if broken:
                raise OSError("no route to the cloud")
"""


@pytest.fixture
def catalogue(tmp_path, monkeypatch):
    """Makes a catalogue for a configuration."""
    monkeypatch.syspath_prepend(tmp_path)
    # A process reads the installed entry points once.
    installation.read_entry_points.cache_clear()
    opened = []

    def make(text=""):
        path = tmp_path / "amphora-driver.conf"
        path.write_text(f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n{text}")
        conf = config.load([str(path)])
        database = Database(conf.amp_database.connection)
        opened.append(database)
        return Catalogue(conf, database)

    yield make
    installation.read_entry_points.cache_clear()
    for database in opened:
        database.dispose()


def test_default_backends_are_found_and_created_once(catalogue):
    found = catalogue()
    assert type(found.network(None)).__name__ == "LocalNetwork"
    assert found.network("local") is found.network(None)
    assert type(found.compute(None, None)).__name__ == "NetnsCompute"
    assert found.compute("netns", "local") is found.compute(None, None)
    assert found.topology("SINGLE").roles == ("STANDALONE",)


def test_the_search_for_backends_sorts_no_entry_points_of_other_packages(catalogue, monkeypatch):
    asked = []
    monkeypatch.setattr(_cache, "get_group_all", lambda *names: asked.append(names) or ())
    found = catalogue()
    found.topology("SINGLE")
    found.compute(None, None)
    assert "SINGLE" in found.deployment().topologies
    assert not asked


def test_concurrent_requests_create_a_backend_once(catalogue):
    found = catalogue()
    together, answers = threading.Barrier(8), []

    def ask():
        together.wait()
        answers.append(found.compute(None, None))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(map(id, answers))) == 1


def test_several_backends_of_one_kind_are_available(catalogue, tmp_path):
    package(tmp_path, "side_by_side", SOURCE, {COMPUTE: {"images": "Images"}, NETWORK: {"elsewhere": "Elsewhere"}})
    found = catalogue("[amp_compute]\nenabled_drivers = images\n[amp_network]\nenabled_drivers = elsewhere\n")
    networks = [found.network(name) for name in ("local", "elsewhere")]
    assert [type(one).__name__ for one in networks] == ["LocalNetwork", "Elsewhere"]
    machines = [found.compute(name, "local") for name in ("netns", "images")]
    assert [type(one).__name__ for one in machines] == ["NetnsCompute", "Images"]
    assert all(one._network is networks[0] for one in machines)
    assert found.compute("images", "elsewhere")._network is networks[1], "ports come from the load balancer's network"
    offered = found.deployment()
    assert list(offered.compute) == ["netns", "images"]
    assert "amp_image_tag" in offered.compute["images"].supports
    assert {name: one.wiring for name, one in offered.network.items()} == {"local": "bridge", "elsewhere": "elsewhere"}


def test_the_description_equals_the_configuration(catalogue):
    found = catalogue(
        "[amp_controller]\nloadbalancer_topology = ACTIVE_STANDBY\n"
        "[amp_haproxy]\nprocess_connection_limit = 7\ntls_minimum_version = TLSv1.3\nconnection_logging = false\n"
    ).deployment()
    assert found.default_topology == "ACTIVE_STANDBY"
    assert "SINGLE" in found.topologies
    assert (found.default_compute, found.default_network) == ("netns", "local")
    assert (found.process_connection_limit, found.tls_minimum_version) == (7, "TLSv1.3")
    assert found.connection_logging is False


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda one: one.compute("gone", None), ["compute backend gone", "[amp_compute] enabled_drivers"]),
        (lambda one: one.network("gone"), ["network backend gone", "[amp_network] enabled_drivers"]),
        (lambda one: one.compute(None, "gone"), ["network backend gone"]),
        (lambda one: one.compute("missing", None), ["missing", "no entry point of this name is installed"]),
        (lambda one: one.compute("unimportable", None), ["unimportable", "no_such_library"]),
        (lambda one: one.topology("RING"), ["RING", TOPOLOGY]),
    ],
)
def test_an_unavailable_backend_is_named_and_affects_no_other(catalogue, tmp_path, ask, words):
    name = f"cannot_be_had_{abs(hash(tuple(words)))}"
    package(tmp_path, name, "import no_such_library", {COMPUTE: {"unimportable": "Some"}})
    found = catalogue("[amp_compute]\nenabled_drivers = missing, unimportable\n")
    with pytest.raises(ConfigurationError) as caught:
        ask(found)
    assert [word for word in words if word not in str(caught.value)] == []
    assert type(found.compute(None, None)).__name__ == "NetnsCompute"
    assert list(found.deployment().compute) == ["netns"], "an unavailable backend is not offered"


def test_a_name_of_two_backends_is_refused(catalogue, tmp_path):
    for name in ("first_images", "second_images"):
        package(tmp_path, name, SOURCE, {COMPUTE: {"images": "Images"}})
    found = catalogue("[amp_compute]\nenabled_drivers = images\n")
    with pytest.raises(ConfigurationError, match="several packages provide it: first_images:Images, second_images"):
        found.compute("images", None)


def test_a_backend_without_supports_is_not_offered(catalogue, tmp_path):
    package(tmp_path, "silent_backend", "class Silent:\n    pass\n", {COMPUTE: {"silent": "Silent"}})
    assert list(catalogue("[amp_compute]\nenabled_drivers = silent\n").deployment().compute) == ["netns"]


def test_a_failed_backend_is_created_later(catalogue, tmp_path):
    package(tmp_path, "fragile_backend", SOURCE, {COMPUTE: {"fragile": "Fragile"}})
    found = catalogue("[amp_compute]\nenabled_drivers = fragile\n")
    with pytest.raises(ConfigurationError, match="no route to the cloud"):
        found.compute("fragile", None)
    import fragile_backend  # noqa: PLC0415 - it was installed a moment ago

    fragile_backend.broken = False
    assert type(found.compute("fragile", None)).__name__ == "Fragile"
