# SPDX-License-Identifier: Apache-2.0
"""The adapter of this provider for the side-by-side benchmark (see README.md).

All measurements use production code. A case that does not exist here raises `NotImplementedError` with the reason.
"""

from pathlib import Path

from adapter_agent import Agent
from adapter_flow import Flow
from adapter_heartbeats import Beats, Heard
from adapter_metrics import Metrics
from adapter_processes import Processes
from adapter_provider import Provider
from adapter_render import OneChangedRendering, RememberingRendering, Rendering
from adapter_store import Store
from adapters.api import Adapter
from cryptography.fernet import Fernet

from amphora_driver.database.vault import Vault


class Haproxy(Rendering, Store, Heard, Beats, Provider, Flow, Processes, Metrics, Agent, Adapter):
    """All cases; rendering without caches."""

    name = "haproxy"

    def __init__(self, workdir):
        super().__init__(workdir)
        self.folder = Path(workdir)
        self.database = None
        self._vault = Vault([Fernet.generate_key()])


class Remembering(RememberingRendering, Haproxy):
    """The implementation `ours-remembering` of the harness."""

    name = "haproxy-remembering"


class OneChanged(OneChangedRendering, Haproxy):
    """The implementation `ours-one-changed` of the harness."""

    name = "haproxy-one-changed"
