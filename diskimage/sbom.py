# SPDX-License-Identifier: Apache-2.0
"""The image's bill of materials.

Invariant: every package in the tree is in it, with the package URL scanners look vulnerabilities up by. Nothing is said
that is not known: licences of Debian's packages are in their copyright files in the image, not in a field.
Source: SPDX 2.3; the purl specification.

    python3 -m diskimage.sbom TREE OUTPUT NAME RELEASE BUILT [IMAGE...]
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from diskimage.contents import Package, packages
from diskimage.manifest import digest

_UNKNOWN = "NOASSERTION"


def document(
    found: Sequence[Package], *, name: str, release: str, built: str, files: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The document.

    Args:
        found: what is in the image.
        name: the image's.
        release: Debian's code name.
        built: when, RFC 3339 in UTC.
        files: names and SHA-256 of the images.
    """
    listed = [_package(one, release) for one in found]
    image = {
        "SPDXID": "SPDXRef-Image",
        "name": name,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
        "primaryPackagePurpose": "OPERATING-SYSTEM",
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": _UNKNOWN,
        "copyrightText": _UNKNOWN,
        "comment": "; ".join(f"{file} sha256:{sha}" for file, sha in files),
    }
    # The same content has the same name, whoever writes it down.
    mark = hashlib.sha256(json.dumps([name, built, listed], sort_keys=True).encode()).hexdigest()
    contains = [
        {"spdxElementId": "SPDXRef-Image", "relationshipType": "CONTAINS", "relatedSpdxElement": one["SPDXID"]}
        for one in listed
    ]
    describes = {
        "spdxElementId": "SPDXRef-DOCUMENT",
        "relationshipType": "DESCRIBES",
        "relatedSpdxElement": "SPDXRef-Image",
    }
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"urn:sha256:{mark}",
        "creationInfo": {"created": built, "creators": ["Tool: octavia-amphora-driver-diskimage"]},
        "packages": [image, *listed],
        "relationships": [describes, *contains],
    }


def url(one: Package, release: str) -> str:
    """The package URL."""
    version = quote(one.version, safe="")
    if one.kind == "deb":
        return f"pkg:deb/debian/{quote(one.name, safe='')}@{version}?arch={one.architecture}&distro={release}"
    return f"pkg:{one.kind}/{quote(one.name, safe='')}@{version}"


def _package(one: Package, release: str) -> dict[str, Any]:
    reference = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": url(one, release),
    }
    entry = {
        # Letters, numbers, points and hyphens only (SPDX 2.3, 7.2): "libstdc++6" and "libstdc--6" stay two.
        "SPDXID": f"SPDXRef-{one.kind}-" + re.sub(r"[^A-Za-z0-9.-]", lambda sign: f".{ord(sign[0]):x}.", one.name),
        "name": one.name,
        "versionInfo": one.version,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": one.licence or _UNKNOWN,
        "copyrightText": _UNKNOWN,
        "externalRefs": [reference],
    }
    if one.source[0]:
        entry["sourceInfo"] = "built from {} {}".format(*one.source)
    return entry


def main(words: Sequence[str]) -> None:
    """Console entry."""
    tree, output, name, release, built, *images = words
    files = [(Path(image).name, digest(Path(image))) for image in images]
    found = document(packages(Path(tree)), name=name, release=release, built=built, files=files)
    Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
