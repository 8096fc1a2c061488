# SPDX-License-Identifier: Apache-2.0
"""The release from which the tests upgrade: a tag with another product, or the first commit with rolling upgrades."""

import subprocess

import previous
import pytest


class Checkout:
    """A git repository with the product in one file."""

    def __init__(self, folder):
        self.folder = folder
        self._git("init", "-q")
        self.commit("1")

    def commit(self, text, file="amphora_driver/driver.py"):
        path = self.folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="ascii")
        self._git("add", file)
        self._git("commit", "-qm", text)

    def tag(self, name):
        self._git("tag", "-a", name, "-m", "release")

    def away(self, text):
        """Make a commit that is not before HEAD, with this text and a tag of this name."""
        self._git("checkout", "-q", "--detach")
        self.commit(text)
        self.tag(text)
        self._git("checkout", "-q", "-")

    def clone(self, folder, *options):
        self._git("clone", "-q", *options, f"file://{self.folder}", str(folder))
        return folder

    def _git(self, *words):
        names = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", self.folder, *names, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "checkout").mkdir()
    return Checkout(tmp_path / "checkout")


def test_a_release_counts_after_a_change_of_the_product(checkout):
    assert previous.release_before(checkout.folder) == previous.FIRST_ROLLING, "there is no tag"
    checkout.tag("0.1.0")
    checkout.tag("some-name")
    assert previous.release_before(checkout.folder) == previous.FIRST_ROLLING, "the release is this version"
    checkout.commit("text", "README.md")
    assert previous.release_before(checkout.folder) == previous.FIRST_ROLLING, "the release has the same product"
    checkout.commit("2")
    assert previous.release_before(checkout.folder) == "0.1.0"
    checkout.tag("0.2.0")
    assert previous.release_before(checkout.folder) == "0.1.0", "the newest release is this version"
    checkout.away("0.3.0")
    assert previous.release_before(checkout.folder) == "0.1.0", "a release of another branch"
    checkout.commit("3")
    checkout.tag("0.10.0")
    checkout.commit("4", "amphora_cluster/plan.py")
    assert previous.release_before(checkout.folder) == "0.10.0", "10 is greater than 2"


def test_a_clone_without_tags_or_history_has_no_release(checkout, tmp_path):
    checkout.tag("0.1.0")
    checkout.commit("2")
    for number, (options, expected) in enumerate(
        (
            ((), "0.1.0"),
            (("--no-tags",), previous.FIRST_ROLLING),
            (("--depth=1",), previous.FIRST_ROLLING),
            (("--depth=2",), "0.1.0"),
        )
    ):
        clone = checkout.clone(tmp_path / f"clone{number}", *options)
        assert previous.release_before(clone) == expected, options


def test_tags_of_a_repository_around_an_archive_mean_nothing(checkout):
    archive = checkout.folder / "archive"
    archive.mkdir()
    checkout.tag("0.1.0")
    checkout.commit("2")
    checkout.commit("1", "archive/amphora_driver")
    assert previous.release_before(archive) == previous.FIRST_ROLLING


def test_without_git_there_is_no_release(checkout, monkeypatch, tmp_path):
    checkout.tag("0.1.0")
    checkout.commit("2")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert previous.release_before(checkout.folder) == previous.FIRST_ROLLING


@pytest.mark.parametrize("tables", [previous.DRIVER, previous.CLUSTER])
def test_a_folder_gets_the_packages_and_the_migrations(tables, tmp_path, monkeypatch):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    # A commit that no history has, as in an archive: this version is copied.
    monkeypatch.setattr(previous, "FIRST_ROLLING", "0" * 40)
    monkeypatch.setattr(previous, "_TAGS", "no-tag")
    revision = previous.release(tmp_path / "old", tables)
    expand, contract = previous.next_schema(tmp_path / "new", tables)
    assert (int(expand), int(contract)) == (int(revision) + 1, int(revision) + 2)
    added = {path.name for path in (tmp_path / "new" / tables.migrations).glob("*_next.py")}
    assert added == {f"{expand}_expand_next.py", f"{contract}_contract_next.py"}
    for name in ("old", "new"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {
            "amphora_driver", "amphora_agent", "amphora_cluster", "sandbox",
        }  # fmt: skip
