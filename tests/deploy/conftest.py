# SPDX-License-Identifier: Apache-2.0
"""A Debian tree, the wheels and their dependencies, once for all tests of this folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import build_wheels  # noqa: E402 - scripts/ is no package
from debian_tree import Tree, download_dependencies, make_tree  # noqa: E402

VERSION = "0.1.0.dev0+test"
# python3-venv and PCRE2 are the packages of the pages, systemd has the programs for users and directories.
PACKAGES = ("python3", "python3-venv", "libpcre2-8-0", "ca-certificates", "systemd")


def pytest_collection_modifyitems(items):
    # A tree, the download of all dependencies and their installation take more than a minute.
    wanted = os.environ.get("AMPHORA_FRESH_HOST") == "1"
    skip = pytest.mark.skip(reason="AMPHORA_FRESH_HOST=1 runs this")
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent and not wanted:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    place = tmp_path_factory.mktemp("dist")
    build_wheels.build_wheels(ROOT, place, VERSION, isolation=False)
    return place


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory):
    place = tmp_path_factory.mktemp("dependencies")
    download_dependencies(place)
    return place


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A new tree, or the one that AMPHORA_DEBIAN_TREE names: its creation takes a minute."""
    if present := os.environ.get("AMPHORA_DEBIAN_TREE"):
        yield Path(present)
        return
    place = tmp_path_factory.mktemp("base") / "root"
    make_tree(place, PACKAGES)
    yield place
    subprocess.run(["rm", "-rf", "--one-file-system", place], check=False)


@pytest.fixture
def tree(base, dependencies, tmp_path):
    """A copy of the tree, with the dependencies in /dependencies for a pip without a network."""
    root = tmp_path / "root"
    subprocess.run(["cp", "--archive", "--reflink=auto", base, root], check=True)
    shutil.copytree(dependencies, root / "dependencies")
    yield Tree(root)
    subprocess.run(["rm", "-rf", "--one-file-system", root], check=False)
