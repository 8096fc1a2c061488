# SPDX-License-Identifier: Apache-2.0
"""The software bill of materials (SBOM) of an image.

Invariant: the document has every package of the tree, with the package URL that vulnerability scanners use. Unknown
facts have no value: the licences of Debian packages are in their copyright files in the image, not in a field.
The format for scanners is that of Syft and Trivy: the distribution is `debian-13` in the URL and a separate package;
the source package is `upstream` in the URL and in `sourceInfo`.
Source: SPDX 2.3; the purl specification.

    python3 -m diskimage.sbom TREE WHEELS OUTPUT NAME BUILT [IMAGE...]
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

from diskimage.contents import Package, digest, packages, version_of

_UNKNOWN = "NOASSERTION"


def build_sbom(
    found: Sequence[Package], *, name: str, debian: str, built: str, files: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The SPDX document.

    Args:
        found: the packages of the image.
        name: the name of the image.
        debian: the version of Debian, as in `VERSION_ID`.
        built: the time of the build, RFC 3339 in UTC.
        files: names and SHA-256 digests of the image files.
    """
    system = {
        **_unknown_fields("SPDXRef-Debian", "debian"),
        "versionInfo": debian,
        "primaryPackagePurpose": "OPERATING-SYSTEM",
    }
    listed = [system, *(_package(one, debian) for one in found)]
    image = {
        **_unknown_fields("SPDXRef-Image", name),
        "primaryPackagePurpose": "OTHER",
        "comment": "; ".join(f"{file} sha256:{sha}" for file, sha in files),
    }
    # The namespace depends on the content only.
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


def _unknown_fields(identifier: str, name: str) -> dict[str, Any]:
    """The mandatory fields of a package with unknown values."""
    return {
        "SPDXID": identifier,
        "name": name,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": _UNKNOWN,
        "copyrightText": _UNKNOWN,
    }


def package_url(one: Package, debian: str) -> str:
    """The package URL."""
    version = quote(one.version, safe="")
    if one.kind != "deb":
        return f"pkg:{one.kind}/{quote(one.name, safe='')}@{version}"
    name, of = one.source
    upstream = name if of == one.version else f"{name}@{of}"
    same = upstream == one.name
    more = "" if same else f"&upstream={quote(upstream, safe='')}"
    return f"pkg:deb/debian/{quote(one.name, safe='')}@{version}?arch={one.architecture}&distro=debian-{debian}{more}"


def _package(one: Package, debian: str) -> dict[str, Any]:
    reference = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": package_url(one, debian),
    }
    # Letters, digits, dots and hyphens only (SPDX 2.3, 7.2); "libstdc++6" and "libstdc--6" must stay different.
    identifier = f"SPDXRef-{one.kind}-" + re.sub(r"[^A-Za-z0-9.-]", lambda sign: f".{ord(sign[0]):x}.", one.name)
    entry = {**_unknown_fields(identifier, one.name), "versionInfo": one.version, "externalRefs": [reference]}
    if one.licence:
        entry["licenseDeclared"] = one.licence
    if one.sha256:
        entry["checksums"] = [{"algorithm": "SHA256", "checksumValue": one.sha256}]
    if one.source[0]:
        entry["sourceInfo"] = "built package from: {} {}".format(*one.source)
    return entry


def main(words: Sequence[str]) -> None:
    """Entry point of the command."""
    tree, wheels, output, name, built, *images = words
    files = [(Path(image).name, digest(Path(image))) for image in images]
    debian = version_of(Path(tree))
    found = build_sbom(packages(Path(tree), Path(wheels)), name=name, debian=debian, built=built, files=files)
    Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
