# SPDX-License-Identifier: Apache-2.0
"""A real Keystone and a real Neutron on loopback, with MariaDB, without agents.

Invariant: each process is a child of this one, and ends with the block or with this process. The mechanism driver
`plugins/lab_ml2.py` binds each port.
"""

from __future__ import annotations

import configparser
import os
import secrets
import signal
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import requests
from keystoneauth1 import session as ks_session
from keystoneauth1.identity import v3
from openstack.connection import Connection

HERE = Path(__file__).parent
# The environment of the services. ./run-tests --all uses a larger one, which also has the services of `whole_cloud.py`.
VENV = Path(os.environ.get("AMPHORA_OPENSTACK_VENV", HERE.parents[1] / ".sandbox/openstack-venv"))
START_SECONDS = 120.0


class Cloud:
    """Two API servers and the users `admin`, `octavia` (role admin, project service) and `demo` (role member).

    Args:
        folder: the directory of all files.
        databases: URLs of empty databases by service.
        ports: ports of the API servers by service.
        password: of all users; None for a new one.
        projects: ids of the projects by name, if the users exist.

    Attributes:
        threads: the API servers, and the number of threads of each.
        accounts: users with their project and roles; the projects exist.
        catalogue: the services that the catalogue names: type and path of their endpoints.
    """

    threads: ClassVar = {"keystone": 4, "neutron": 8}
    accounts: ClassVar = (
        ("neutron", "service", ("admin", "service")),
        ("octavia", "service", ("admin",)),
        ("plain", "service", ("member",)),
        ("demo", "demo", ("member",)),
        ("other", "other", ("member",)),
    )
    catalogue: ClassVar = {"neutron": ("network", "")}

    def __init__(self, folder, databases, ports, password=None, projects=None):
        self.folder = folder
        self.password = password or secrets.token_hex(16)
        self.databases = databases
        self.ports = ports
        self._processes = {}
        self._http = []
        self.auth_url = f"http://127.0.0.1:{ports['keystone']}/v3"
        self.projects = projects or {}

    # --- start and stop ---------------------------------------------------------------------------------------------

    def prepare(self):
        """Create the tables in empty databases, and the users."""
        self._write_configuration()
        with ThreadPoolExecutor(2) as threads:
            tables = threads.submit(self.prepare_neutron)
            self.prepare_keystone()
            self.serve("keystone")
            self.await_answer("keystone")
            self._make_users()
            tables.result()

    def start(self):
        """Start both servers with prepared databases."""
        self._write_configuration()
        for name in self.threads:
            self.serve(name)
        for name in self.threads:
            self.await_answer(name)

    def serve(self, name):
        """Start an API server; `await_answer` returns when it answers."""
        application, variables, words = self.application(name)
        program = [VENV / "bin/python", HERE / "serve_wsgi.py", self.ports[name], self.threads[name], application]
        self.run(name, [*program, *words], self._environment(variables))

    def application(self, name):
        """The WSGI application of a service, the variables of its environment, and its arguments."""
        variables = {f"OS_{name.upper()}_CONFIG_DIR": str(self.folder / name)}
        if name == "neutron":
            variables["OS_NEUTRON_CONFIG_FILES"] = "neutron.conf"
        return f"{name}.wsgi.api", variables, []

    def run(self, name, argv, environment):
        """Start a program that ends with the calling thread; its output is in NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # A separate process group: the children of a program end with it.
                start_new_session=True,
            )

    def running(self):
        """The names of the started programs."""
        return set(self._processes)

    def await_answer(self, name):
        """Wait until a server answers."""
        self.until(name, lambda: self._answers(name))

    def until(self, name, ready):
        """Wait until a started program is ready; its log is in the failure."""
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            assert self._processes[name].poll() is None, f"{name} has ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{name} is not ready:\n{self.log(name)}"
            time.sleep(0.05)

    def kill(self, name):
        """End a server at once: its clients see a refused connection."""
        process = self._processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def stop(self):
        for one in self._http:
            one.close()
        for name in list(self._processes):
            self.kill(name)

    def _answers(self, name):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/", timeout=30):
                return True
        except urllib.error.HTTPError:
            return True  # 300 from Keystone and Glance, 401 from Neutron
        except OSError:
            return False

    def log(self, name):
        """The end of the log of a program."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def prepare_keystone(self):
        self._prepare("prepare_keystone.py", self.file("keystone"), self.password, self.auth_url)

    def prepare_neutron(self):
        self._prepare("prepare_neutron.py", "--config-file", self.file("neutron"))

    def _prepare(self, program, *words):
        run_command(VENV / "bin/python", HERE / program, *words, environment=self._environment({}))

    def _environment(self, more):
        # PYTHONPATH and the variables of OpenStack's clients belong to the environment of the test.
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPYCACHEPREFIX") if name in os.environ}
        return {**kept, "HOME": str(self.folder), "LANG": "C.UTF-8", "PYTHONPATH": str(HERE / "plugins"), **more}

    # --- configuration ----------------------------------------------------------------------------------------------

    def auth(self, user="octavia", project="service"):
        """Return the options of keystoneauth for a user."""
        return {
            "auth_type": "password",
            "auth_url": self.auth_url,
            "username": user,
            "password": self.password,
            "project_name": project,
            "user_domain_id": "default",
            "project_domain_id": "default",
        }

    def token(self, user):
        """Options of keystonemiddleware for a service."""
        return {**self.auth(user), "www_authenticate_uri": self.auth_url}

    def file(self, name):
        return str(self.folder / name / f"{name}.conf")

    def _write_configuration(self):
        for name in self.threads:
            self.write(name, getattr(self, f"_{name}")())

    def _keystone(self):
        return {
            "fernet_tokens": {"key_repository": self.folder / "fernet"},
            "credential": {"key_repository": self.folder / "credential"},
            # The least of bcrypt: each authentication computes one digest.
            "identity": {"password_hash_rounds": 4},
            # An authentication then takes a sixth of the processor time. Keystone has one process.
            "cache": {"enabled": True, "backend": "oslo_cache.dict"},
        }

    def _neutron(self):
        return {
            "DEFAULT": {
                "core_plugin": "ml2",
                "service_plugins": "qos",
                "transport_url": "fake://",
                "api_paste_config": VENV / "etc/neutron/api-paste.ini",
                "notify_nova_on_port_status_changes": False,
                "notify_nova_on_port_data_changes": False,
            },
            "keystone_authtoken": self.token("neutron"),
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
        }

    def write(self, name, sections):
        """Write the configuration file of a service; these sections supplement the common ones."""
        place = self.folder / name
        place.mkdir()
        (place / "policy.yaml").write_text("{}\n")
        shared = {
            "DEFAULT": {"use_stderr": True, "state_path": place},
            "database": {"connection": self.databases[name], "max_pool_size": 5, "max_overflow": 20},
            "oslo_concurrency": {"lock_path": place / "locks"},
            "oslo_policy": {"policy_file": place / "policy.yaml"},
        }
        write_ini(Path(self.file(name)), merged(shared, sections))

    # --- users and clients ------------------------------------------------------------------------------------------

    def _make_users(self):
        identity = self.connect("admin", "admin").identity
        roles = {role.name: role for role in identity.roles()}
        for name in ("service", "demo", "other"):
            self.projects[name] = identity.create_project(name=name, domain_id="default").id
        for name in {one for *_, names in self.accounts for one in names} - roles.keys():
            roles[name] = identity.create_role(name=name)
        for user, project, names in self.accounts:
            made = identity.create_user(name=user, password=self.password, domain_id="default")
            for role in names:
                identity.assign_project_role_to_user(self.projects[project], made, roles[role])
        for name, (kind, path) in self.catalogue.items():
            service = identity.create_service(type=kind, name=name)
            for interface in ("public", "internal"):
                identity.create_endpoint(
                    service_id=service.id,
                    interface=interface,
                    region_id="RegionOne",
                    url=f"http://127.0.0.1:{self.ports[name]}{path}",
                )

    def connect(self, user="octavia", project="service"):
        """Return a user's client that is independent of the code under test."""
        names = {"username": user, "project_name": project, "user_domain_id": "default", "project_domain_id": "default"}
        auth = v3.Password(self.auth_url, password=self.password, **names)
        http = requests.Session()
        self._http.append(http)
        return Connection(session=ks_session.Session(auth, session=http), region_name="RegionOne")


def run_command(*argv, environment=None, written=""):
    """Run a program to its end; return its standard output.

    Args:
        argv: the program and its arguments.
        environment: its environment; None for that of this process.
        written: its standard input.
    """
    done = subprocess.run(
        argv,
        env=environment,
        input=written,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{argv}: {done.stderr[-4000:]}"
    return done.stdout


def merged(first, second):
    """The options of both dictionaries by section; the second one has priority."""
    return {section: {**first.get(section, {}), **second.get(section, {})} for section in sorted({*first, *second})}


def write_ini(path, sections):
    """Write a configuration file of oslo.config."""
    # RawConfigParser would copy [DEFAULT] into all sections.
    parser = configparser.RawConfigParser(default_section="none")
    for section, options in sections.items():
        parser[section] = {option: str(value) for option, value in options.items()}
    with path.open("w") as file:
        parser.write(file)
