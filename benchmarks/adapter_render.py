# SPDX-License-Identifier: Apache-2.0
"""The case `render` of the harness: rendering, and a check by HAProxy as in an amphora.

The measured time includes only the load balancer's part, as in production: the agent writes the machine's part from its
own templates. This part precedes the text, so that `haproxy -c` reads the same configuration as in an amphora.
"""

import sys
import uuid
from pathlib import Path

import msgspec
from adapter_tree import tree

from amphora_agent.bundle import Bundle, File, Limits, digest
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.process import Haproxy as Agent
from amphora_agent.paths import Paths
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.render import backend, frontend, haproxy


class Rendering:
    """Rendering with empty caches."""

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
        """Write the files of the text; the harness's certificate replaces all secrets."""
        return {str(self._place / one.name): one.content or "@pem" for one in self._files}

    @property
    def _place(self):
        return Path(self.workdir) / "files"

    def _machine_part(self, rendered):
        paths = Paths(Path(self.workdir) / "machine")
        for folder in (paths.var, paths.run, self._place):
            folder.mkdir(parents=True, exist_ok=True)
        # This instance only writes and computes: it needs no services, no namespace and no accounting.
        agent = Agent(paths, None, None, None)
        agent.write_machine_configuration()
        files = tuple(File(one.name, digest(one.name.encode())) for one in rendered.files)
        bundle = Bundle(uuid.UUID(int=1), uuid.UUID(int=2), 1, rendered.text, files, {}, Limits(None, None), ())
        document = agent.compose_document(rendered.text, parse(rendered.text), bundle, self._place)
        return paths.machine_configuration.read_text() + document.head


class RememberingRendering(Rendering):
    """Rendering of the same objects again: all sections are cached."""

    def render(self):
        return self._machine + haproxy.render(self._tree).text


class OneChangedRendering(Rendering):
    """Rendering after a change of one member, from new objects, as in a controller."""

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
    """Clear all caches of the renderer."""
    for cache in (backend._EXAMINED, frontend._FRONTENDS):  # noqa: SLF001 - only the benchmark clears them
        cache.clear()
    for one in _REMEMBERED:
        one.cache_clear()
