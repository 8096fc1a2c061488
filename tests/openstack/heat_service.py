# SPDX-License-Identifier: Apache-2.0
"""A real Heat on the complete cloud, for the tests that need one: its API and one engine.

Heat has no stack domain: templates with users of their own, for example signed signals, do not work.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from cloud_lab import VENV, run_command

HERE = Path(__file__).parent
_ENGINE = "heat-engine"


class Heat:
    """Heat's API and engine on a started cloud."""

    def __init__(self, cloud):
        self._cloud = cloud

    def start(self):
        cloud = self._cloud
        cloud.write("heat", self._options())
        file = ("--config-file", cloud.file("heat"))
        environment = cloud._environment({})
        run_command(VENV / "bin/python", HERE / "prepare_heat.py", cloud.databases["heat"], environment=environment)
        serve = (VENV / "bin/python", HERE / "serve_wsgi.py", cloud.ports["heat"], 4, "heat.wsgi.api")
        cloud.run("heat", [*serve, *file], environment)
        cloud.run(_ENGINE, [VENV / f"bin/{_ENGINE}", *file], environment)
        cloud.await_answer("heat")
        # A request that arrives before the engine listens has no answer for a minute.
        cloud.until(_ENGINE, lambda: "Starting engine_worker" in cloud.log(_ENGINE))
        heat = cloud.connect("demo", "demo").orchestration
        cloud.until(_ENGINE, lambda: heat.get("/build_info").status_code == 200)

    def stop(self):
        for name in ("heat", _ENGINE):
            self._cloud.kill(name)

    def _options(self):
        cloud = self._cloud
        trustee = {name: value for name, value in cloud.auth("heat").items() if not name.startswith("project_")}
        return {
            "DEFAULT": {
                "transport_url": cloud.transport,
                "num_engine_workers": 1,
                "auth_encryption_key": secrets.token_hex(16),
                "region_name_for_services": "RegionOne",
            },
            "paste_deploy": {"api_paste_config": VENV / "etc/heat/api-paste.ini"},
            "keystone_authtoken": cloud.token("heat"),
            "trustee": trustee,
            "clients_keystone": {"auth_uri": cloud.auth_url},
            "oslo_messaging_notifications": {"driver": "noop"},
        }
