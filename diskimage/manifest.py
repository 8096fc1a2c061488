# SPDX-License-Identifier: Apache-2.0
"""The manifest of an image, a JSON file beside it.

Invariant: a manifest is sufficient to request the same packages again (`pins`, `requirements`) and to verify the result
(`differences`).

    python3 -m diskimage.manifest write TREE WHEELS OUTPUT.manifest NAME RELEASE ARCH COMMIT BUILT ELEMENTS FILE...
    python3 -m diskimage.manifest pins MANIFEST | requirements MANIFEST | summary MANIFEST | compare MANIFEST TREE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diskimage.contents import Package, digest, packages

FORMAT = 2
_AGENT = "octavia-amphora-driver"


def build_manifest(
    tree: Path,
    wheels: Path,
    *,
    name: str,
    release: str,
    architecture: str,
    commit: str,
    built: str,
    elements: Sequence[str],
    files: Sequence[Path],
) -> dict[str, Any]:
    """The content of a manifest.

    Args:
        tree: the root of the image's file system.
        wheels: the directory of the wheels of the build.
        name: the name of the image.
        release: the Debian release.
        architecture: the Debian architecture.
        commit: the commit of the sources, with "-dirty" after local changes.
        built: the time of the build, RFC 3339.
        elements: the elements of diskimage-builder.
        files: the image files.
    """
    found = packages(tree, wheels)
    versions = {one.name: one.version for one in found}
    return {
        "format": FORMAT,
        "name": name,
        "release": release,
        "architecture": architecture,
        "built": built,
        "elements": list(elements),
        "agent": {"version": versions.get(_AGENT), "commit": commit},
        "haproxy": versions.get("haproxy"),
        "keepalived": versions.get("keepalived"),
        "kernel": sorted(path.name for path in (tree / "lib/modules").glob("*")),
        "tree_bytes": tree_size(tree),
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": digest(file)} for file in files},
        "packages": [
            {"name": one.name, "version": one.version, "architecture": one.architecture, "sha256": one.sha256}
            for one in found
            if one.kind == "deb"
        ],
        "python": [
            {"name": one.name, "version": one.version, "sha256": one.sha256} for one in found if one.kind == "pypi"
        ],
    }


def tree_size(tree: Path) -> int:
    """The size of all files in a tree in bytes; a file with several hard links counts once."""
    seen = {}
    for path in tree.rglob("*"):
        found = path.lstat()
        if path.is_file() and not path.is_symlink():
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


def read_manifest(file: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        ValueError: the file is not a manifest of this format.
    """
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{file} is not a manifest of format {FORMAT}")
    return found


def pins(manifest: dict[str, Any]) -> str:
    """apt_preferences(5) that pin the versions of a manifest."""
    blocks = [
        f"Package: {one['name']}\nPin: version {one['version']}\nPin-Priority: 1001\n" for one in manifest["packages"]
    ]
    return "\n".join(blocks)


def requirements(manifest: dict[str, Any]) -> str:
    """A requirements file for pip with the versions and digests of a manifest."""
    return "".join(
        f"{one['name']}=={one['version']} --hash=sha256:{one['sha256']}\n"
        for one in manifest["python"]
        if one["name"] != _AGENT
    )


def differences(manifest: dict[str, Any], found: Sequence[Package]) -> list[str]:
    """The differences between a manifest and a tree, one line for each package except the agent."""
    wanted = {("deb", one["name"]): one["version"] for one in manifest["packages"]}
    wanted |= {("pypi", one["name"]): one["version"] for one in manifest["python"]}
    there = {(one.kind, one.name): one.version for one in found}
    return [
        f"{name}: requested {wanted.get((kind, name), 'none')}, installed {there.get((kind, name), 'none')}"
        for kind, name in sorted(wanted.keys() | there.keys())
        if name != _AGENT and wanted.get((kind, name)) != there.get((kind, name))
    ]


def summary(manifest: dict[str, Any]) -> str:
    """A summary of a manifest in one line."""
    agent = manifest["agent"]
    return (
        f"{manifest['name']}: {len(manifest['packages'])} packages, {len(manifest['python'])} of Python, "
        f"{manifest['tree_bytes'] // 10**6} MB of files; HAProxy {manifest['haproxy']}, "
        f"keepalived {manifest['keepalived']}, kernel {', '.join(manifest['kernel'])}, "
        f"agent {agent['version']} ({agent['commit'][:12]})\n"
    )


_TEXTS = {"pins": pins, "requirements": requirements, "summary": summary}


def main(words: Sequence[str]) -> None:
    """Entry point of the commands."""
    verb, *rest = words
    if verb == "write":
        tree, wheels, output, name, release, architecture, commit, built, elements, *files = rest
        found = build_manifest(
            Path(tree),
            Path(wheels),
            name=name,
            release=release,
            architecture=architecture,
            commit=commit,
            built=built,
            elements=elements.split(),
            files=[Path(file) for file in files],
        )
        Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    elif verb in _TEXTS:
        sys.stdout.write(_TEXTS[verb](read_manifest(Path(rest[0]))))
    elif lines := differences(read_manifest(Path(rest[0])), packages(Path(rest[1]))):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
