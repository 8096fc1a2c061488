# SPDX-License-Identifier: Apache-2.0
"""Installs a package with backends and real entry points, as in an operator's installation."""

import textwrap
from pathlib import Path


def package(folder, name, source, entry_points):
    """Install a module into a folder of sys.path.

    Args:
        folder: the destination, which must be on sys.path before the first use.
        name: of the module and of the distribution; unique for each test, because a module is imported once.
        source: of the module.
        entry_points: names and targets (within the module) by group.
    """
    folder = Path(folder)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {name}:{target}" for point, target in points.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
