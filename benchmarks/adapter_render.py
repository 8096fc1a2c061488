# SPDX-License-Identifier: Apache-2.0
"""The harness's case `render`: what a controller renders, checked by HAProxy as an amphora has it checked.

Only the load balancer's part is rendered in the measured time, as in production: the machine's part is written by the
agent, from its own templates, when the amphora starts and with each set of files. It stands before the text so that
`haproxy -c` reads what an amphora's HAProxy reads.
"""

import hashlib
import sys
from pathlib import Path

import msgspec
from adapter_tree import tree

from amphora_agent.bundle import File, Limits
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.process import Haproxy as Agent
from amphora_agent.paths import Paths
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.render import haproxy


class Rendering:
    """Nothing is remembered from one rendering to the next."""

    def render_setup(self, spec):
        self._tree = tree(spec)
        rendered = haproxy.render(self._tree)
        if rendered.refused:
            raise RuntimeError(f"refused: {rendered.refused[0]}")
        self._files = rendered.files
        self._machine = self._machine_part(rendered)

    def render(self):
        forget()
        return self._machine + haproxy.render(self._tree).text

    def render_files(self):
        """Secrets are the harness's certificate."""
        return {str(self._place / one.name): one.content or "@pem" for one in self._files}

    @property
    def _place(self):
        return Path(self.workdir) / "files"

    def _machine_part(self, rendered):
        paths = Paths(Path(self.workdir) / "machine")
        for folder in (paths.var, paths.run, self._place):
            folder.mkdir(parents=True, exist_ok=True)
        # It writes and computes here, and runs nothing: no services, no namespace, no accounts.
        agent = Agent(paths, None, None, None)
        agent.write_machine_configuration()
        files = [File(one.name, hashlib.sha256(one.name.encode()).hexdigest()) for one in rendered.files]
        document = agent.compose_document(
            rendered.text, parse(rendered.text), files, self._place, Limits(None, None), None
        )
        return paths.machine_configuration.read_text() + document.head


class RememberingRendering(Rendering):
    """Rendering the very same load balancer again: every section is remembered."""

    def render(self):
        return self._machine + haproxy.render(self._tree).text


class OneChangedRendering(Rendering):
    """Rendering after one member changed, from objects read anew: what a controller does all day."""

    def render_setup(self, spec):
        super().render_setup(spec)
        self._copies = [msgspec.json.decode(msgspec.json.encode(self._tree), type=LoadBalancer) for _ in range(8)]
        self._turn = 0

    def render(self):
        whole = self._copies[self._turn % len(self._copies)]
        pool, *pools = whole.pools
        member, *members = pool.members
        self._turn += 1
        changed = msgspec.structs.replace(member, protocol_port=1024 + self._turn % 60_000)
        pool = msgspec.structs.replace(pool, members=(changed, *members))
        return self._machine + haproxy.render(msgspec.structs.replace(whole, pools=(pool, *pools))).text


def _caches():
    rooms = ("amphora_driver.validation.", "amphora_driver.render.")
    values = [
        value for name, module in sys.modules.items() if name.startswith(rooms) for value in vars(module).values()
    ]
    return {id(value): value for value in values if hasattr(value, "cache_clear")}.values()


_REMEMBERED = tuple(_caches())


def forget():
    """Empty every cache that a rendering fills."""
    haproxy.forget()
    for one in _REMEMBERED:
        one.cache_clear()
