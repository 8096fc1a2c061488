# SPDX-License-Identifier: Apache-2.0
"""One process that imports the programs of a sandbox once, and forks each program that a test starts.

The import takes 9 of the 10 seconds of processor time that a sandbox needs to start. All workers of a run share the
process. `Supervision` ends the forks of a sandbox; the process ends the remaining forks at the end of the run.

The process forks only `python -m MODULE` of this interpreter, for a module of `_MODULES`. All other programs start as
in an operator's sandbox, and `test_sandbox.py` starts all programs in that way.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

import forks
import preloaded_agent

from amphora_driver import failpoints
from amphora_driver.compute import netns
from amphora_driver.host import detached_process as processes
from sandbox.processes import Supervision

_MODULES = {
    "gunicorn": "gunicorn.__main__",
    "sandbox.fake_neutron_api": "sandbox.fake_neutron_api",
    "sandbox.octavia_start": "sandbox.octavia_start",
    "sandbox.forward_in": "sandbox.forward_in",
    "sandbox.forward_out": "sandbox.forward_out",
    "amphora_driver.controller.service": "amphora_driver.controller.service",
    "amphora_driver.health.service": "amphora_driver.health.service",
}
# Modules that these programs import while they run: drivers by name, databases by URL, gunicorn's workers.
_LATER = (
    "octavia.api.app",
    "octavia.cmd.driver_agent",
    "octavia.db.models",
    "octavia.db.repositories",
    "gunicorn.app.wsgiapp",
    "gunicorn.workers.gthread",
    "amphora_driver.driver",
    "amphora_driver.provider_agent.process",
    "amphora_driver.compute.netns",
    "amphora_driver.network.local",
    "amphora_driver.topology",
    "sandbox.octavia_network",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "sqlalchemy.dialects.mysql.pymysql",
    "pymysql",
)
# The PYTHONPATH of this process, and so of the preloaded one. A test may set a different one for its sandbox.
_PYTHONPATH = os.environ.get("PYTHONPATH")
_AGENT_PYTHON = os.environ.get("AMPHORA_AGENT_PYTHON", sys.executable)


def supervision_forks(supervision: Supervision) -> None:
    """Let a sandbox start its programs by forks, if this run has a folder."""
    if forks.FOLDER in os.environ:
        supervision.spawn = _spawn
        preloaded_agent.ready(_AGENT_PYTHON, os.environ)


def _spawn(argv, environment, log, pass_as_3=None):
    request = _request(list(argv), dict(environment), log)
    if request is None:
        return processes.spawn(argv, environment, log, pass_as_3)
    descriptors = [] if pass_as_3 is None else [pass_as_3]
    return _found(forks.ask(Path(__file__), sys.executable, dict(os.environ), request, descriptors), argv, log)


def _found(pid, argv, log):
    found = processes.identify(pid)
    if found is None:
        raise ProcessLookupError(f"{argv[0]} ended at once; its log is {log}")
    return found


def _request(argv, environment, log):
    """Return the request for the process; None if it cannot start this program in this environment."""
    namespace = None
    if argv[0] == "nsenter" and argv[1].startswith("--net=") and argv[2] == "--":
        namespace, argv = argv[1].removeprefix("--net="), argv[3:]
    if argv[:2] != [sys.executable, "-m"] or argv[2] not in _MODULES:
        return None
    if environment.get("PYTHONPATH") != _PYTHONPATH:
        return None
    return {"argv": argv[2:], "environment": environment, "log": str(log), "namespace": namespace}


# -- forking process ---------------------------------------------------------------------------------------------------


def _become(request, descriptors) -> None:
    """Run the program of a request."""
    if descriptors:
        os.dup2(descriptors[0], 3)
    if request["namespace"] is not None:
        forks.enter(request["namespace"])
    failpoints._DIRECTORY = os.environ.get(failpoints.VARIABLE)
    netns.spawn = _spawn_amphora
    module, *arguments = request["argv"]
    sys.argv = [module, *arguments]
    # gunicorn imports its application from its working directory.
    sys.path[0] = str(Path.cwd())
    runpy.run_module(_MODULES[module], run_name="__main__", alter_sys=True)


def _spawn_amphora(argv, environment, log):
    """Run the command of `compute/netns.py` as `spawn` does, by a fork where possible."""
    words = list(argv)
    interpreter, *rest = words[words.index("--wd=/") + 2 :]
    if interpreter != _AGENT_PYTHON or environment.get("PYTHONPATH") != _PYTHONPATH:
        return processes.spawn(argv, environment, log)
    namespace = words[1].removeprefix("--net=")
    return _found(preloaded_agent.boot(interpreter, Path(rest[-1]), namespace, environment, log), argv, log)


def _prepare() -> None:
    from sandbox import octavia_start  # noqa: PLC0415 - only in this process

    octavia_start.prepare()
    for name in (*_MODULES.values(), *_LATER):
        if name != "gunicorn.__main__":
            importlib.import_module(name)


if __name__ == "__main__":
    _prepare()
    forks.serve(_become)
