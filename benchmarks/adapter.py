# SPDX-License-Identifier: Apache-2.0
"""This provider, plugged into the side-by-side benchmark (see README.md).

Every number is earned with the code that runs in production. Where the harness measures something that is not there,
`NotImplementedError` says why.
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
    """Rendering with nothing remembered; everything else as it is."""

    name = "haproxy"

    def __init__(self, workdir):
        super().__init__(workdir)
        self.folder = Path(workdir)
        self.database = None
        self._vault = Vault([Fernet.generate_key()])


class Remembering(RememberingRendering, Haproxy):
    """What the harness calls `ours-remembering`."""

    name = "haproxy-remembering"


class OneChanged(OneChangedRendering, Haproxy):
    """What the harness calls `ours-one-changed`."""

    name = "haproxy-one-changed"
