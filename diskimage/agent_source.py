# SPDX-License-Identifier: Apache-2.0
"""A source distribution of the agent: this project without the control plane.

Invariant: an amphora gets only the agent's package, its entry point and its dependencies, and no code of the
controller. The version is that of the project.

    python3 -m diskimage.agent_source PROJECT FOLDER
"""

from __future__ import annotations

import configparser
import io
import shutil
import sys
from pathlib import Path

PACKAGE = "amphora_agent"
EXTRA = "agent"
_FILES = ("pyproject.toml", "LICENSE", "README.md")


def agent_setup_cfg(text: str) -> str:
    """A setup.cfg that builds only the agent.

    Args:
        text: the setup.cfg of the project.
    """
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names of entry points are case-sensitive
    parser.read_string(text)
    parser["options.packages.find"] = {"include": f"\n{PACKAGE}*"}
    parser["options.package_data"] = _only(parser["options.package_data"], PACKAGE)
    parser.remove_section("options.data_files")
    parser["options.extras_require"] = {EXTRA: parser["options.extras_require"][EXTRA]}
    scripts = parser["options.entry_points"]["console_scripts"]
    agents = [line for line in scripts.splitlines() if f"= {PACKAGE}." in line]
    parser["options.entry_points"] = {"console_scripts": "\n" + "\n".join(agents)}
    out = io.StringIO()
    parser.write(out)
    return out.getvalue()


def _only(section: configparser.SectionProxy, package: str) -> dict[str, str]:
    return {name: value for name, value in section.items() if name.split(".")[0] == package}


def stage_source(project: Path, place: Path) -> None:
    """Copy the source of the agent to a new directory."""
    place.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(project / name, place / name)
    (place / "setup.cfg").write_text(
        agent_setup_cfg((project / "setup.cfg").read_text(encoding="utf-8")), encoding="utf-8"
    )
    shutil.copytree(project / PACKAGE, place / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


if __name__ == "__main__":
    stage_source(Path(sys.argv[1]), Path(sys.argv[2]))
