# SPDX-License-Identifier: Apache-2.0
"""The agent's own source distribution: this project without the control plane.

Invariant: what is installed in an amphora is the agent's package, its entry point and what its extra names; nothing of
the controller is there to be read or run, and the version is the project's.

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


def reduced(text: str) -> str:
    """A setup.cfg that builds the agent alone.

    Args:
        text: the project's setup.cfg.
    """
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names of entry points have capitals
    parser.read_string(text)
    parser["options.packages.find"] = {"include": f"\n{PACKAGE}*"}
    parser["options.package_data"] = _only(parser["options.package_data"], PACKAGE)
    parser["options.extras_require"] = {EXTRA: parser["options.extras_require"][EXTRA]}
    scripts = parser["options.entry_points"]["console_scripts"]
    ours = [line for line in scripts.splitlines() if f"= {PACKAGE}." in line]
    parser["options.entry_points"] = {"console_scripts": "\n" + "\n".join(ours)}
    out = io.StringIO()
    parser.write(out)
    return out.getvalue()


def _only(section: configparser.SectionProxy, package: str) -> dict[str, str]:
    return {name: value for name, value in section.items() if name.split(".")[0] == package}


def stage(project: Path, place: Path) -> None:
    """Lay the agent's source into an empty folder."""
    place.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(project / name, place / name)
    (place / "setup.cfg").write_text(reduced((project / "setup.cfg").read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copytree(project / PACKAGE, place / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


if __name__ == "__main__":
    stage(Path(sys.argv[1]), Path(sys.argv[2]))
