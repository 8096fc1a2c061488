# SPDX-License-Identifier: Apache-2.0
"""A real Keystone and a real Neutron on loopback, with MariaDB, without agents.

Invariant: each process is a child of this one, and ends with the block or with this process. The mechanism driver
`plugins/lab_ml2.py` binds each port.
"""

from __future__ import annotations

import configparser
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import mariadb
import requests
from free_ports import free_ports
from keystoneauth1 import session as ks_session
from keystoneauth1.identity import v3
from openstack.connection import Connection

HERE = Path(__file__).parent
# The environment of the services. ./run-tests --all uses a larger one, which also has the services of `whole_cloud.py`.
VENV = Path(os.environ.get("AMPHORA_OPENSTACK_VENV", HERE.parents[1] / ".sandbox/openstack-venv"))
_START_SECONDS = 120.0
_THREADS = {"keystone": 4, "neutron": 8}


class Cloud:
    """Two API servers and the users `admin`, `octavia` (role admin, project service) and `demo` (role member)."""

    def __init__(self, folder, urls):
        self.folder = folder
        self.password = secrets.token_hex(16)
        self._databases = dict(zip(("keystone", "neutron"), urls, strict=True))
        self._ports = dict(zip(("keystone", "neutron"), free_ports(2), strict=True))
        self._processes = {}
        self._http = []
        self.auth_url = f"http://127.0.0.1:{self._ports['keystone']}/v3"
        self.projects = {}

    # --- start and stop ---------------------------------------------------------------------------------------------

    def start(self):
        """Prepare both databases side by side, start both servers, make the users."""
        self._write_configuration()
        with ThreadPoolExecutor(2) as threads:
            tables = threads.submit(self._run, "prepare_neutron.py", "--config-file", self._file("neutron"))
            self._run("prepare_keystone.py", self._file("keystone"), self.password, self.auth_url)
            self.serve("keystone")
            self.await_answer("keystone")
            tables.result()
            # Neutron loads its plug-ins while the users are made.
            self.serve("neutron")
            self._make_users()
        self.await_answer("neutron")

    def serve(self, name):
        """Start a server; `await_answer` returns when it answers."""
        variables = {
            "keystone": {"OS_KEYSTONE_CONFIG_DIR": str(self.folder / "keystone")},
            "neutron": {
                "OS_NEUTRON_CONFIG_DIR": str(self.folder / "neutron"),
                "OS_NEUTRON_CONFIG_FILES": "neutron.conf",
            },
        }
        words = [HERE / "serve_wsgi.py", self._ports[name], _THREADS[name], f"{name}.wsgi.api"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", VENV / "bin/python", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(variables[name]),
            )

    def await_answer(self, name):
        """Wait until a server answers."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers(name):
            assert self._processes[name].poll() is None, self._log(name)
            assert time.monotonic() < deadline, self._log(name)
            time.sleep(0.1)

    def kill(self, name):
        """End a server at once: its clients see a refused connection."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(60)

    def stop(self):
        for one in self._http:
            one.close()
        for name in list(self._processes):
            self.kill(name)

    def _answers(self, name):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[name]}/", timeout=30):
                return True
        except urllib.error.HTTPError:
            return True  # 300 from Keystone, 401 from Neutron
        except OSError:
            return False

    def _log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def _run(self, program, *words):
        done = subprocess.run(
            [VENV / "bin/python", HERE / program, *words],
            env=self._environment({}),
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stderr[-4000:]}"

    def _environment(self, more):
        # Not this test's environment: PYTHONPATH and the variables of OpenStack's clients belong to another one.
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPYCACHEPREFIX") if name in os.environ}
        return {**kept, "HOME": str(self.folder), "LANG": "C.UTF-8", "PYTHONPATH": str(HERE / "plugins"), **more}

    # --- configuration ----------------------------------------------------------------------------------------------

    def auth(self, user="octavia", project="service"):
        """Options of keystoneauth for a user."""
        return {
            "auth_type": "password",
            "auth_url": self.auth_url,
            "username": user,
            "password": self.password,
            "project_name": project,
            "user_domain_id": "default",
            "project_domain_id": "default",
        }

    def _file(self, name):
        return str(self.folder / name / f"{name}.conf")

    def _write_configuration(self):
        keys = {name: self.folder / name for name in ("fernet", "credential")}
        self._write(
            "keystone",
            {
                "fernet_tokens": {"key_repository": keys["fernet"]},
                "credential": {"key_repository": keys["credential"]},
                # The least of bcrypt: each authentication computes one digest.
                "identity": {"password_hash_rounds": 4},
            },
        )
        self._write(
            "neutron",
            {
                "DEFAULT": {
                    "core_plugin": "ml2",
                    "service_plugins": "qos",
                    "transport_url": "fake://",
                    "api_paste_config": VENV / "etc/neutron/api-paste.ini",
                    "notify_nova_on_port_status_changes": False,
                    "notify_nova_on_port_data_changes": False,
                },
                "keystone_authtoken": {**self.auth("neutron"), "www_authenticate_uri": self.auth_url},
                "ml2": {
                    "type_drivers": "vxlan",
                    "tenant_network_types": "vxlan",
                    "mechanism_drivers": "lab",
                    "extension_drivers": "port_security,qos",
                },
                "ml2_type_vxlan": {"vni_ranges": "1:10000"},
                # The tests leave their objects: the cloud ends with the run.
                "quotas": {
                    "quota_network": -1,
                    "quota_subnet": -1,
                    "quota_port": -1,
                    "quota_security_group": -1,
                    "quota_security_group_rule": -1,
                },
            },
        )

    def _write(self, name, sections):
        place = self.folder / name
        place.mkdir()
        (place / "policy.yaml").write_text("{}\n")
        shared = {
            "DEFAULT": {"use_stderr": True, "state_path": place},
            "database": {"connection": self._databases[name], "max_pool_size": 5, "max_overflow": 20},
            "oslo_concurrency": {"lock_path": place / "locks"},
            "oslo_policy": {"policy_file": place / "policy.yaml"},
        }
        # RawConfigParser would copy [DEFAULT] into all sections.
        parser = configparser.RawConfigParser(default_section="none")
        for section in sorted({*shared, *sections}):
            options = {**shared.get(section, {}), **sections.get(section, {})}
            parser[section] = {option: str(value) for option, value in options.items()}
        with (place / f"{name}.conf").open("w") as file:
            parser.write(file)

    # --- users and clients ------------------------------------------------------------------------------------------

    def _make_users(self):
        identity = self.connect("admin", "admin").identity
        roles = {role.name: role for role in identity.roles()}
        for name in ("service", "demo", "other"):
            self.projects[name] = identity.create_project(name=name, domain_id="default").id
        for user, project, names in (
            ("neutron", "service", ("admin", "service")),
            ("octavia", "service", ("admin",)),
            ("plain", "service", ("member",)),
            ("demo", "demo", ("member",)),
            ("other", "other", ("member",)),
        ):
            made = identity.create_user(name=user, password=self.password, domain_id="default")
            for role in names:
                identity.assign_project_role_to_user(self.projects[project], made, roles[role])
        service = identity.create_service(type="network", name="neutron")
        for kind in ("public", "internal"):
            identity.create_endpoint(
                service_id=service.id,
                interface=kind,
                region_id="RegionOne",
                url=f"http://127.0.0.1:{self._ports['neutron']}",
            )

    def connect(self, user="octavia", project="service"):
        """A client of a user that is independent of the code under test."""
        names = {"username": user, "project_name": project, "user_domain_id": "default", "project_domain_id": "default"}
        auth = v3.Password(self.auth_url, password=self.password, **names)
        http = requests.Session()
        self._http.append(http)
        return Connection(session=ks_session.Session(auth, session=http), region_name="RegionOne")


@contextmanager
def cloud():
    """Run a cloud while the block does."""
    folder = Path(tempfile.mkdtemp(prefix="adc-"))
    try:
        with mariadb.server("keystone", "neutron") as urls:
            made = Cloud(folder, urls)
            try:
                made.start()
                yield made
            finally:
                made.stop()
    finally:
        shutil.rmtree(folder)
