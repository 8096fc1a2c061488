# SPDX-License-Identifier: Apache-2.0
"""The manifest and the bill of materials of an image."""

import hashlib
import json
import re

import pytest

from diskimage import contents, manifest, sbom


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def image(tmp_path):
    file = tmp_path / "a.qcow2"
    file.write_bytes(b"image")
    return file


@pytest.fixture
def wheels(tmp_path):
    """The inputs of a build."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "flask-3.1.3-py3-none-any.whl").write_bytes(b"flask")
    (folder / "flask-3.1.2-py3-none-any.whl").write_bytes(b"another flask")
    (folder / "octavia_amphora_driver-0.1.0-py3-none-any.whl").write_bytes(b"agent")
    return folder


@pytest.fixture
def written(tree, wheels, image, tmp_path):
    output = tmp_path / "a.manifest"
    words = ("a", "trixie", "amd64", "c0ffee", "2026-11-22T00:00:00Z", "debian-minimal amphora", image)
    manifest.main(["write", *map(str, (tree, wheels, output, *words))])
    return output


def test_the_manifest_lists_the_installed_packages(tree):
    found = {(one.kind, one.name): one.version for one in contents.packages(tree)}
    assert found == {
        ("deb", "haproxy"): "3.0.11-1+deb13u5",
        ("deb", "libstdc++6"): "14.2.0-19",
        ("pypi", "flask"): "3.1.3",
        ("pypi", "octavia-amphora-driver"): "0.1.0",
    }


def test_the_manifest_describes_the_image(written):
    found = json.loads(written.read_text())
    assert found["haproxy"] == "3.0.11-1+deb13u5"
    assert found["agent"] == {"version": "0.1.0", "commit": "c0ffee"}
    assert found["kernel"] == ["6.12.1-cloud-amd64"]
    assert found["elements"] == ["debian-minimal", "amphora"]
    assert found["files"] == {"a.qcow2": {"bytes": 5, "sha256": hashlib.sha256(b"image").hexdigest()}}
    assert "HAProxy 3.0.11-1+deb13u5" in manifest.summary(found)


def test_the_packages_of_a_manifest_can_be_installed_again(written):
    found = manifest.read_manifest(written)
    assert "Package: libstdc++6\nPin: version 14.2.0-19\nPin-Priority: 1001\n" in manifest.pins(found)
    assert manifest.requirements(found) == f"flask==3.1.3 --hash=sha256:{sha256(b'flask')}\n"


def test_the_manifest_has_the_digest_of_each_installed_file(written):
    found = json.loads(written.read_text())
    assert {one["name"]: one["sha256"] for one in found["python"]} == {
        "flask": sha256(b"flask"),
        "octavia-amphora-driver": sha256(b"agent"),
    }
    # The index had another version of the library when the build recorded its digests.
    assert {one["name"]: one["sha256"] for one in found["packages"]} == {"haproxy": "ab" * 32, "libstdc++6": ""}


def test_different_packages_are_reported(written, tree):
    found = manifest.read_manifest(written)
    assert manifest.differences(found, contents.packages(tree)) == []
    status = tree / "var/lib/dpkg/status"
    status.write_text(status.read_text().replace("3.0.11-1+deb13u5", "3.0.12-1").replace("libstdc++6", "libstdc++7"))
    assert manifest.differences(found, contents.packages(tree)) == [
        "haproxy: requested 3.0.11-1+deb13u5, installed 3.0.12-1",
        "libstdc++6: requested 14.2.0-19, installed none",
        "libstdc++7: requested none, installed 14.2.0-19",
    ]
    with pytest.raises(SystemExit, match="haproxy"):
        manifest.main(["compare", str(written), str(tree)])


def test_another_document_is_refused_as_manifest(tmp_path):
    file = tmp_path / "x"
    for text in ("[]", "{}", '{"format": 1}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="not a manifest"):
            manifest.read_manifest(file)


def test_every_package_is_in_the_bill_of_materials(tree, wheels, image, tmp_path):
    output = tmp_path / "a.spdx.json"
    sbom.main([str(tree), str(wheels), str(output), "a", "2026-11-22T00:00:00Z", str(image)])
    found = json.loads(output.read_text())
    assert found["spdxVersion"] == "SPDX-2.3"
    by_name = {one["name"]: one for one in found["packages"]}
    urls = [reference["referenceLocator"] for one in found["packages"] for reference in one.get("externalRefs", ())]
    assert urls == [
        "pkg:deb/debian/haproxy@3.0.11-1%2Bdeb13u5?arch=amd64&distro=debian-13",
        "pkg:deb/debian/libstdc%2B%2B6@14.2.0-19?arch=amd64&distro=debian-13&upstream=gcc-14",
        "pkg:pypi/flask@3.1.3",
        "pkg:pypi/octavia-amphora-driver@0.1.0",
    ]
    assert by_name["libstdc++6"]["sourceInfo"] == "built package from: gcc-14 14.2.0-19"
    assert by_name["haproxy"]["checksums"] == [{"algorithm": "SHA256", "checksumValue": "ab" * 32}]
    assert by_name["flask"]["checksums"] == [{"algorithm": "SHA256", "checksumValue": sha256(b"flask")}]
    assert "checksums" not in by_name["libstdc++6"]
    assert by_name["debian"]["versionInfo"] == "13"
    assert by_name["debian"]["primaryPackagePurpose"] == "OPERATING-SYSTEM"
    assert by_name["flask"]["licenseDeclared"] == "BSD-3-Clause"
    assert hashlib.sha256(b"image").hexdigest() in by_name["a"]["comment"]


def test_references_of_the_bill_of_materials_hold(tree):
    found = sbom.build_sbom(contents.packages(tree), name="a", debian="13", built="2026-11-22T00:00:00Z")
    names = [one["SPDXID"] for one in found["packages"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", name) for name in names)
    related = {one["relatedSpdxElement"] for one in found["relationships"]}
    assert related == set(names)
    again = sbom.build_sbom(contents.packages(tree), name="a", debian="13", built="2026-11-22T00:00:00Z")
    assert again == found
