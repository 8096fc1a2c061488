# SPDX-License-Identifier: Apache-2.0
"""An amphora under Octavia's own worker code, which runs in its own process beside the controller."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The tests use the network, the amphora and the certificates of the data plane's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "dataplane"))

import pki
from amphora_lab import Amphora, eventually
from octavia_process import Worker
from pair_lab import PairNetwork
from throwaway_authority import Authority


@pytest.fixture(scope="session")
def compat_network():
    made = PairNetwork(f"co{os.getpid()}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def tenant_secrets():
    """A tenant's certificates by the references of listeners."""
    authority = pki.Authority("tenant")
    issued = {name: authority.issue(name, number=number) for number, name in enumerate(("one.test", "two.test"))}
    client = authority.issue("client.test")
    found = {name: {"certificate": each.certificate_pem, "key": each.key_pem} for name, each in issued.items()}
    return {"secrets": {**found, "ca": authority.pem}, "authority": authority, "issued": issued, "client": client}


@pytest.fixture(scope="session")
def controllers():
    return Authority("controllers")


@pytest.fixture(scope="session")
def worker(compat_network, controllers, tmp_path_factory, tenant_secrets):
    """The process starts before the first amphora, because the import of Octavia takes some seconds."""
    made = Worker(compat_network, controllers, tmp_path_factory.mktemp("worker"), tenant_secrets["secrets"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def booted(compat_network, controllers, tmp_path_factory):
    """One amphora for a module: `booted()` starts it, or a new one in its place."""
    made = []

    def boot() -> Amphora:
        end()
        compat_network.plug()
        made.append(Amphora(compat_network, tmp_path_factory.mktemp("compat"), controllers))
        made[-1].start()
        eventually(made[-1].answers, "the agent answers")
        return made[-1]

    def end() -> None:
        for each in made:
            each.power_off()
            compat_network.unplug()
        made.clear()

    yield boot
    end()
