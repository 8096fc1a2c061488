# SPDX-License-Identifier: Apache-2.0
"""Build the two wheels of a release: the driver and the agent.

The wheel octavia-amphora-driver has the control plane (`amphora_driver`, `amphora_cluster`) and the files of
`deploy/`. The wheel octavia-amphora-agent has `amphora_agent`. The driver uses templates and pure modules of the agent,
so its wheel requires the agent's wheel of the same version, without the dependencies of an amphora.

The version comes from git. At a tag it is the tag. Otherwise it is a development version of the next release, with the
number of commits since the last tag, and the commit. `setup.cfg` has the version of the next release. An unpacked
archive of a release gets this version. A shallow clone without a tag is refused, because it cannot count its commits.

    python3 scripts/build_wheels.py [--directory DIRECTORY] [--no-isolation]

Without isolation, pip uses the setuptools of this Python, and needs no index.
"""

from __future__ import annotations

import argparse
import configparser
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from diskimage import agent_source  # noqa: E402 - the root of the checkout is on the path only now

DRIVER, AGENT = "octavia-amphora-driver", "octavia-amphora-agent"
_PACKAGES = ("amphora_driver", "amphora_cluster")
# Extras of the driver's wheel. `driver` stays valid there, without a dependency, as in an installation of a checkout.
_EXTRAS = ("distributed", "openstack", "cluster")
_FILES = ("pyproject.toml", "LICENSE", "README.md")
_TAGS = "[0-9]*.[0-9]*.[0-9]*"
_DESCRIBED = re.compile(r"(?P<tag>.+)-(?P<commits>\d+)-g(?P<commit>[0-9a-f]+)(?P<dirty>-dirty)?")


class Position(NamedTuple):
    """The position of a work tree in the history; `tag` is the last release before it."""

    tag: str | None
    commits: int
    commit: str
    dirty: bool


def next_version(planned: str, position: Position) -> str:
    """Return the version of a work tree.

    Args:
        planned: the version in setup.cfg, of the next release.
        position: the place of the work tree in the history.

    Raises:
        ValueError: the tag of this commit differs from setup.cfg.
    """
    tag, commits, commit, dirty = position
    if tag is not None and not commits and not dirty:
        if tag != planned:
            raise ValueError(f"Could not build {tag}: setup.cfg has the version {planned}. Correct one of them.")
        return tag
    base = planned
    if tag is not None and _numbers(planned) <= _numbers(tag):
        *first, last = _numbers(tag)
        base = ".".join(map(str, [*first, last + 1]))
    return f"{base}.dev{commits}+g{commit}{'.dirty' if dirty else ''}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def read_position(project: Path) -> Position | None:
    """Return the position of a checkout in the history; None for an unpacked archive.

    Raises:
        ValueError: the clone is shallow and has no release.
    """

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(project), "-c", "safe.directory=*", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    if not (project / ".git").exists():
        return None
    described = git("describe", "--tags", "--long", "--dirty", "--abbrev=9", "--match", _TAGS)
    if described and (found := _DESCRIBED.fullmatch(described)):
        return Position(found["tag"], int(found["commits"]), found["commit"], bool(found["dirty"]))
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise ValueError("Could not find the version: the history is incomplete. Run: git fetch --unshallow --tags")
    count, commit = git("rev-list", "--count", "HEAD"), git("rev-parse", "--short=9", "HEAD")
    if count is None or commit is None:
        return None
    return Position(None, int(count), commit, bool(git("status", "--porcelain", "--untracked-files=no")))


def driver_setup_cfg(text: str, version: str) -> str:
    """Return a setup.cfg that builds only the control plane.

    Args:
        text: the setup.cfg of the project.
        version: the version of both wheels.
    """
    parser = _parsed(text)
    parser["metadata"]["version"] = version
    parser["options.packages.find"] = {"include": "".join(f"\n{name}*" for name in _PACKAGES)}
    data = parser["options.package_data"]
    parser["options.package_data"] = {name: data[name] for name in data if name.split(".")[0] in _PACKAGES}
    extras = parser["options.extras_require"]
    parser["options"]["install_requires"] = f"{extras['driver']}\n{AGENT}=={version}"
    parser["options.extras_require"] = {"driver": "", **{name: extras[name] for name in _EXTRAS}}
    points = parser["options.entry_points"]
    parser["options.entry_points"] = {group: _without_agent(points[group]) for group in points}
    return _written(parser)


def agent_setup_cfg(text: str, version: str) -> str:
    """Return a setup.cfg that builds only the agent, under the name of its own distribution."""
    parser = _parsed(agent_source.agent_setup_cfg(text))
    parser["metadata"]["name"] = AGENT
    parser["metadata"]["version"] = version
    parser["metadata"]["description"] = "The agent of an amphora of the Octavia amphora driver"
    return _written(parser)


def _without_agent(points: str) -> str:
    return "\n" + "\n".join(line for line in points.splitlines() if line and f"= {agent_source.PACKAGE}." not in line)


def _parsed(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names of entry points are case-sensitive
    parser.read_string(text)
    return parser


def _written(parser: configparser.ConfigParser) -> str:
    out = io.StringIO()
    parser.write(out)
    return out.getvalue()


def stage_driver(project: Path, place: Path) -> None:
    """Copy the sources of the control plane to a new directory, without setup.cfg."""
    place.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(project / name, place / name)
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for name in (*_PACKAGES, "deploy"):
        shutil.copytree(project / name, place / name, ignore=unwanted)


def build_wheels(project: Path, directory: Path, version: str, *, isolation: bool = True) -> list[Path]:
    """Build both wheels and return their files.

    Args:
        project: the checkout.
        directory: the destination.
        version: the version of both wheels.
        isolation: whether pip installs setuptools into an environment for the build.

    Raises:
        subprocess.CalledProcessError: a build failed.
    """
    text = (project / "setup.cfg").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        driver, agent, out = (Path(scratch) / name for name in ("driver", "agent", "wheels"))
        stage_driver(project, driver)
        (driver / "setup.cfg").write_text(driver_setup_cfg(text, version), encoding="utf-8")
        agent_source.stage_source(project, agent)
        (agent / "setup.cfg").write_text(agent_setup_cfg(text, version), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-cache-dir", "--wheel-dir", str(out)]
        command += [] if isolation else ["--no-build-isolation"]
        # Equal sources give equal wheels: all files get the time of the commit.
        environment = {**os.environ, "SOURCE_DATE_EPOCH": _commit_time(project)}
        subprocess.run([*command, str(driver), str(agent)], check=True, env=environment)
        directory.mkdir(parents=True, exist_ok=True)
        return sorted(Path(shutil.copy(wheel, directory)) for wheel in out.glob("*.whl"))


def _commit_time(project: Path) -> str:
    command = ["git", "-C", str(project), "-c", "safe.directory=*", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # The earliest time that a zip file can contain is in 1980.
    return done.stdout.strip() or "315532800"


def main() -> None:
    """Build the wheels of this checkout."""
    parser = argparse.ArgumentParser(description="Build the wheels of the driver and of the agent.")
    parser.add_argument("--directory", type=Path, default=ROOT / "dist", help="destination; by default dist/")
    parser.add_argument(
        "--no-isolation", action="store_true", help="use the setuptools of this Python instead of an index"
    )
    options = parser.parse_args()
    planned = _parsed((ROOT / "setup.cfg").read_text(encoding="utf-8"))["metadata"]["version"]
    try:
        position = read_position(ROOT)
        version = planned if position is None else next_version(planned, position)
        wheels = build_wheels(ROOT, options.directory, version, isolation=not options.no_isolation)
    except (ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from error
    for wheel in wheels:
        sys.stdout.write(f"{wheel}\n")


if __name__ == "__main__":
    main()
