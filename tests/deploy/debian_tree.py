# SPDX-License-Identifier: Apache-2.0
"""A Debian tree in a directory, in which commands run as on a fresh host or in a container."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("driver", "openstack", "distributed", "cluster")
_SECONDS = 600


def run(command, **options):
    """Run a command; its output is part of the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS, **options)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def make_tree(place, packages):
    """Install the release of this machine with some packages into a new directory, from the sources of this machine."""
    listed = run(["apt-get", "indextargets", "--format", "$(RELEASE) deb $(REPO_URI) $(RELEASE) $(COMPONENT)"])
    release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())[1]
    lines = {line.split(" ", 1)[1] for line in listed.splitlines() if line.split("-")[0].split(" ")[0] == release}
    command = ["mmdebstrap", "--variant=minbase", "--mode=root", f"--include={','.join(packages)}"]
    # The packages are not kept, and their documentation is not needed.
    command += ["--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"]
    run([*command, release, place, "-"], input="\n".join(sorted(lines)) + "\n")


class Tree:
    """The root directory of a host."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def command(self, words, user=None, environment=None):
        """The command that runs words in the tree, in its own mounts and processes, without a network."""
        values = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        values |= environment or {}
        apart = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", f"--mount-proc={self.root}/proc"]
        inside = ["chroot", *([f"--userspec={user}"] if user else []), str(self.root)]
        return [*apart, *inside, "env", "-i", *(f"{name}={value}" for name, value in values.items()), *words]

    def run(self, words, user=None, environment=None):
        return run(self.command(words, user, environment))

    def shell(self, script, environment=None):
        return self.run(["bash", "-euo", "pipefail", "-c", script], environment=environment)


def download_dependencies(place):
    """Get the distributions that the wheels need, with the index and the configuration of this machine's pip."""
    import build_wheels  # noqa: PLC0415 - scripts/ is no package; conftest.py adds it to the path

    parser = build_wheels._parsed((ROOT / "setup.cfg").read_text(encoding="utf-8"))
    lines = [line for extra in EXTRAS for line in parser["options.extras_require"][extra].splitlines()]
    wanted = [str(Requirement(line)) for line in lines if line and not line.startswith("#")]
    words = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", place]
    run([sys.executable, *words, "--constraint", ROOT / "constraints.txt", *wanted], env=os.environ)
