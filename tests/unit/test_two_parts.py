# SPDX-License-Identifier: Apache-2.0
"""A run in two parts judges every test once and names the tests that passed at a second attempt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from feature_matrix import file_name
from two_parts import (
    CALM_LOAD,
    IMAGE,
    MOST_ASKED_AGAIN,
    MOST_REPEATED,
    RINGS,
    SHARED_CLOUD,
    WHOLE_CLOUD,
    Again,
    Alone,
    Together,
    image_asked,
    is_calm,
)

TESTS = Path(__file__).parents[1]
CONFTEST = """
import pathlib
import feature_matrix, two_parts
two_parts.CALM_SECONDS = 0  # this test keeps the machine busy itself
two_parts.KNOWN_SECOND_ATTEMPTS = pathlib.Path("second-attempts.txt")
def pytest_addoption(parser):
    feature_matrix.add_options(parser)
    two_parts.add_options(parser)
def pytest_configure(config):
    config.addinivalue_line("markers", "quiet")
    config.addinivalue_line("markers", "extended")
    matrix = feature_matrix.FeatureMatrix(config)
    config.pluginmanager.register(matrix)
    two_parts.register(config, matrix)
def pytest_xdist_make_scheduler(config, log):
    return two_parts.scheduler(config, log)
"""
FINE = "def test_fine(): pass\n"
QUIET = """
import os, pytest
@pytest.mark.quiet
@pytest.mark.feature("member.weight")
def test_quiet():
    assert "PYTEST_XDIST_WORKER" not in os.environ
"""
NOT_CALM = """
import os, pytest
@pytest.mark.feature("member.weight", "member.backup")
@pytest.mark.parametrize("number", range({count}))
def test_nervous(number):
    assert "PYTEST_XDIST_WORKER" not in os.environ, "another worker is here"
"""
STALLED = """
import pathlib, pytest
@pytest.mark.quiet
@pytest.mark.feature("member.weight")
def test_stalled():
    here = pathlib.Path("stalled")
    if not here.exists():
        here.touch()
        assert not "a machine that stood still"
"""
EXTENDED = """
import pytest
pytestmark = pytest.mark.extended
def test_slow():
    assert not "run"
@pytest.mark.quiet
def test_slow_and_quiet():
    assert not "run"
"""
BAD = "def test_bad():\n    assert not 'good'\n"


class Project:
    """A folder of tests with one passing test in each ring."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "second-attempts.txt").write_text("# none yet\n")
        for number, ring in enumerate(RINGS):
            self.write(ring, f"test_{number}.py", FINE)

    def write(self, ring: str, name: str, source: str) -> None:
        (self._folder / "tests" / ring).mkdir(parents=True, exist_ok=True)
        (self._folder / "tests" / ring / name).write_text(source)

    def known(self, nodeid: str) -> None:
        (self._folder / "second-attempts.txt").write_text(f"# known\n{nodeid}  # 2026-11-22, not explained yet\n")

    def together(self, *more: str, workers: int = 1) -> tuple[int, str]:
        return self._run(*more, "--together", "out", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder")

    def alone(self, *more: str) -> tuple[int, str]:
        return self._run(*more, "--alone", "out", "--feature-matrix", "out/matrix")

    def again(self) -> tuple[int, str]:
        return self._run("--again", "out", "--feature-matrix", "out/matrix")

    def out(self, name: str) -> str:
        return self.text(Path("out", name))

    def text(self, file: Path) -> str:
        return (self._folder / file).read_text()

    def _run(self, *options: str) -> tuple[int, str]:
        # This test may run in a worker itself. Unused plug-ins would take most of its time.
        unset = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "xdist.plugin", *options, "tests"],
            cwd=self._folder,
            env={**unset, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return run.returncode, run.stdout + run.stderr


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


WORKER = """
import os, pathlib
def test_worker():
    pathlib.Path(__file__).with_suffix(".worker").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


@pytest.mark.parametrize("files", [SHARED_CLOUD, WHOLE_CLOUD], ids=["network", "whole"])
def test_one_worker_runs_the_files_that_share_a_cloud(project, files):
    for file in files:
        project.write("openstack", Path(file).name, WORKER)
    status, said = project.together(workers=3)
    assert status == 0, said
    workers = {project.text(Path("tests", file).with_suffix(".worker")) for file in files}
    assert len(workers) == 1


CRASHED = """
import os, pathlib, time
def test_crashed():
    here = pathlib.Path("crashed")
    if not here.exists():
        here.touch()
        time.sleep(2)  # Until the other worker has ended.
        os._exit(1)
"""


@pytest.mark.extended
def test_a_worker_that_ends_in_the_last_test_is_replaced(project):
    project.write(RINGS[-1], "test_zz.py", CRASHED)
    status, said = project.together("--max-worker-restart", "2", workers=2)
    assert "replacing crashed worker" in said
    assert "1 failed" in said, said
    assert status == 1


@pytest.mark.extended
def test_a_failure_in_the_parallel_part_has_a_second_attempt(project):
    project.write("unit", "test_quiet.py", QUIET)
    project.write("system", "test_nervous.py", NOT_CALM.format(count=MOST_REPEATED))
    status, said = project.together(workers=2)
    assert (status, f"{MOST_REPEATED} failed, {len(RINGS)} passed" in said) == (1, True), said
    status, said = project.alone()
    assert (status, f"{MOST_REPEATED + 1} passed, {len(RINGS)} deselected" in said) == (0, True), said
    assert "passed at the second attempt: tests/system/test_nervous.py::test_nervous[0]" in said
    assert project.out("second-attempts.txt").count("another worker is here") >= MOST_REPEATED
    matrix = project.out(f"matrix/{file_name('member')}")
    for line in ("weight", "backup"):
        assert f"[operation.{line}]\ndriver.haproxy=complete\n" in matrix


@pytest.mark.extended
def test_a_test_on_the_list_gets_no_second_attempt_in_the_second_part(project):
    project.write("system", "test_nervous.py", NOT_CALM.format(count=1))
    nodeid = "tests/system/test_nervous.py::test_nervous[0]"
    project.known(nodeid)
    assert project.together()[0] == 1
    status, said = project.alone()
    assert (status, f"on the list of tests/second-attempts.txt, and failed again: {nodeid}" in said) == (1, True), said


@pytest.mark.extended
def test_a_test_on_the_list_gets_no_second_attempt_after_the_second_part(project):
    project.write("system", "test_stalled.py", STALLED)
    project.known("tests/system/test_stalled.py::test_stalled")
    assert project.together()[0] == 0
    assert project.alone()[0] == 1
    status, said = project.again()
    assert (status, "failed again: tests/system/test_stalled.py::test_stalled" in said) == (1, True), said


@pytest.mark.extended
def test_extended_tests_run_with_all_only(project):
    project.write("unit", "test_quiet.py", QUIET)
    project.write("unit", "test_slow.py", EXTENDED)
    project.write("image", "test_image.py", FINE)
    assert project.together()[0] == 0
    status, said = project.alone()
    assert status == 0, said
    status, said = project.together("--all")
    assert (status, "1 failed" in said) == (1, True), said
    status, said = project.alone("--all")
    assert (status, "2 failed, 1 passed" in said) == (1, True), said


@pytest.mark.extended
def test_a_second_failure_fails_the_run(project):
    project.write("unit", "test_quiet.py", QUIET + BAD)
    assert project.together()[0] == 1
    status, said = project.alone()
    assert (status, "1 failed, 1 passed" in said) == (1, True), said


def test_a_failure_in_the_second_part_has_a_second_attempt(project):
    project.write("system", "test_stalled.py", STALLED)
    project.write("unit", "test_nervous.py", NOT_CALM.format(count=1))
    assert project.together()[0] == 1
    status, said = project.alone()
    assert (status, "1 failed, 1 passed" in said) == (1, True), said
    status, said = project.again()
    assert (status, f"1 passed, {len(RINGS) + 1} deselected" in said) == (0, True), said
    assert "second attempt: tests/system/test_stalled.py::test_stalled (failed alone, passed on an idle machine" in said
    kept = project.out("second-attempts.txt")
    assert ("another worker is here" in kept, "a machine that stood still" in kept) == (True, True), kept
    # The outcomes of both parts count, and for a repeated test the last one.
    matrix = project.out(f"matrix/{file_name('member')}")
    for line in ("weight", "backup"):
        assert f"[operation.{line}]\ndriver.haproxy=complete\n" in matrix


# -- verdict without a run ---------------------------------------------------------------------------------------------


def report(nodeid: str, outcome: str = "passed", when: str = "call"):
    states = {each: each == outcome for each in ("passed", "failed", "skipped")}
    return SimpleNamespace(nodeid=nodeid, when=when, longreprtext=f"{nodeid} is {outcome}", **states)


def one_of_each() -> list[str]:
    return [f"tests/{ring}/test_it.py::test_it" for ring in RINGS]


CONFIG = SimpleNamespace(
    getoption=lambda _: False,
    hook=SimpleNamespace(pytest_deselected=lambda items: None),
    get_terminal_writer=lambda: SimpleNamespace(line=lambda text, **_: None),
)


def item(nodeid: str, *, quiet: bool = False):
    marked = {"quiet"} if quiet else set()
    return SimpleNamespace(nodeid=nodeid, config=CONFIG, get_closest_marker=lambda name: name in marked or None)


class Run:
    """Both parts, without running tests."""

    config = CONFIG

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def together(self, *reports) -> None:
        part = Together(self._directory)
        for each in reports:
            part.pytest_runtest_logreport(each)
        part.pytest_sessionfinish(SimpleNamespace(config=self.config))

    def alone(self, *items) -> tuple[Alone, list[str]]:
        """The second part and its list of tests."""
        part = Alone(self._directory, SimpleNamespace(earlier=lambda *_: None))
        chosen = list(items)
        part.pytest_collection_modifyitems(self.config, chosen)
        return part, [each.nodeid for each in chosen]

    def alone_fails(self, items, *reports, status: int = 1) -> None:
        """The second part from its start to its end."""
        part, _ = self.alone(*items)
        for each in reports:
            part.pytest_runtest_logreport(each)
        part.pytest_sessionfinish(SimpleNamespace(config=self.config), status)

    def again(self, *items) -> tuple[Again, list[str]]:
        part = Again(self._directory, SimpleNamespace(earlier=lambda *_: None))
        chosen = list(items)
        part.pytest_collection_modifyitems(self.config, chosen)
        return part, [each.nodeid for each in chosen]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_tests_run_in_the_order_of_rings(run):
    items = [item("quiet", quiet=True), item("fine"), item("bad")]
    first = list(items)
    Together(run._directory).pytest_collection_modifyitems(run.config, first)
    assert [each.nodeid for each in first] == ["fine", "bad"]
    run.together(report("fine"), report("bad", "failed"))
    assert run.alone(*items)[1] == ["quiet", "bad"]


def test_every_test_and_every_ring_needs_an_outcome(run):
    *most, last = one_of_each()
    skipped = "tests/unit/test_it.py::test_skipped"
    run.together(*map(report, most), report(skipped, "skipped", "setup"))
    part, _ = run.alone(*map(item, [*most, last, skipped]))
    assert part.complaints() == [f"no test passed in: {RINGS[-1]}", f"was run in neither part: {last}"]
    part.pytest_runtest_logreport(report(last))
    assert part.complaints() == []


@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
def test_a_repeated_test_counts_once(run, when):
    everything = one_of_each()
    nervous = everything[0]
    run.together(*map(report, everything), report(nervous, "failed", when))
    part, chosen = run.alone(*map(item, everything))
    assert chosen == [nervous]
    assert part.complaints() == [f"no test passed in: {RINGS[0]}", f"was run in neither part: {nervous}"]
    part.pytest_runtest_logreport(report(nervous))
    assert (part.second_attempts(), part.complaints()) == ([nervous], [])
    part.pytest_runtest_logreport(report(nervous, "failed", "teardown"))
    assert part.second_attempts() == []


def test_a_skipped_second_attempt_fails_the_run(run):
    everything = one_of_each()
    nervous = everything[0]
    run.together(*map(report, everything[1:]), report(nervous, "failed"))
    part, _ = run.alone(*map(item, everything))
    part.pytest_runtest_logreport(report(nervous, "skipped", "setup"))
    assert f"failed, and was only skipped when it was repeated: {nervous}" in part.complaints()


def test_too_many_failures_are_not_repeated(run):
    names = [f"tests/unit/test_it.py::test_{number}" for number in range(MOST_REPEATED + 1)]
    run.together(*(report(name, "failed") for name in names))
    with pytest.raises(pytest.exit.Exception, match="too many to be repeated") as ended:
        run.alone(*map(item, names))
    assert ended.value.returncode == 1


def test_a_test_without_a_second_attempt_fails_the_run(run):
    run.together(*map(report, one_of_each()), report("renamed", "failed"))
    part, _ = run.alone(*map(item, one_of_each()))
    assert part.complaints() == ["failed, and could not be found again: renamed"]


def test_the_second_part_needs_the_first(run):
    run.together(report("fine"))
    Together(run._directory)  # a new run that does not reach its end
    with pytest.raises(pytest.UsageError, match="the first part did not come to an end"):
        run.alone()


# -- failures of the second part ---------------------------------------------------------------------------------------


def quiet_ones(count: int) -> list[str]:
    return [f"tests/unit/test_it.py::test_quiet_{number}" for number in range(count)]


def test_only_failed_tests_are_repeated(run):
    everything, quiet = one_of_each(), quiet_ones(2)
    items = [*map(item, everything), *(item(each, quiet=True) for each in quiet)]
    run.together(*map(report, everything))
    run.alone_fails(items, report(quiet[0]), report(quiet[1], "failed"))
    part, chosen = run.again(*items)
    assert chosen == [quiet[1]]
    assert part.complaints() == [f"was run in neither part: {quiet[1]}"]
    part.pytest_runtest_logreport(report(quiet[1]))
    assert (part.second_attempts(), part.complaints()) == ([quiet[1]], [])
    part.pytest_runtest_logreport(report(quiet[1], "failed", "teardown"))
    assert part.second_attempts() == []


def test_too_many_failures_of_the_second_part_are_not_repeated(run):
    names = quiet_ones(MOST_ASKED_AGAIN + 1)
    items = [item(name, quiet=True) for name in names]
    run.together(*map(report, one_of_each()))
    run.alone_fails(items, *(report(name, "failed") for name in names))
    with pytest.raises(pytest.exit.Exception, match="too many to be repeated") as ended:
        run.again(*items)
    assert ended.value.returncode == 1


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param(lambda nervous, quiet: [report(nervous, "failed")], id="twice"),
        pytest.param(lambda nervous, quiet: [report(nervous, "failed"), report(quiet, "failed")], id="another too"),
        pytest.param(lambda nervous, quiet: [report(nervous, "skipped"), report(quiet, "failed")], id="skipped"),
        pytest.param(lambda nervous, quiet: [report(nervous), report(quiet)], id="none"),
    ],
)
def test_no_test_has_a_third_attempt(run, reports):
    """No other test is repeated either if the run fails in any case."""
    nervous, *fine = one_of_each()
    (quiet,) = quiet_ones(1)
    items = [*map(item, [nervous, *fine]), item(quiet, quiet=True)]
    run.together(*map(report, fine), report(nervous, "failed"))
    run.alone_fails(items, *reports(nervous, quiet))
    with pytest.raises(pytest.UsageError, match="nothing is asked again"):
        run.again(*items)


def test_an_interrupted_part_is_not_repeated(run):
    (quiet,) = quiet_ones(1)
    run.together(*map(report, one_of_each()))
    run.alone_fails([item(quiet, quiet=True)], report(quiet, "failed"), status=int(pytest.ExitCode.INTERRUPTED))
    with pytest.raises(pytest.UsageError, match="nothing is asked again"):
        run.again(item(quiet, quiet=True))


def test_a_new_run_ignores_the_results_of_the_previous_run(run):
    (quiet,) = quiet_ones(1)
    run.together(*map(report, one_of_each()))
    run.alone_fails([item(quiet, quiet=True)], report(quiet, "failed"))
    run.together(*map(report, one_of_each()))
    with pytest.raises(pytest.UsageError, match="nothing is asked again"):
        run.again(item(quiet, quiet=True))


@pytest.mark.parametrize(
    ("pressure", "load", "calm"),
    [
        ("some avg10=3.10 avg60=40.00 avg300=8.47 total=1\n", "9.0 9.0 9.0 1/125 1\n", True),
        ("some avg10=30.10 avg60=0.00 avg300=0.00 total=1\n", "0.0 0.0 0.0 1/125 1\n", False),
        (None, f"{CALM_LOAD} 9.0 9.0 1/125 1\n", True),
        (None, "1000.0 0.0 0.0 1/125 1\n", False),
    ],
)
def test_an_idle_machine_is_recognised(tmp_path, pressure, load, calm):
    if pressure:
        (tmp_path / "cpu").write_text(pressure)
    (tmp_path / "loadavg").write_text(load)
    assert is_calm(tmp_path / "cpu", tmp_path / "loadavg") is calm


@pytest.mark.parametrize(("said", "asked"), [(None, "1"), ("", "1"), ("1", "1"), ("0", ""), ("all", "all")])
def test_image_is_booted_unless_disabled(monkeypatch, said, asked):
    monkeypatch.delenv(IMAGE, raising=False)
    if said is not None:
        monkeypatch.setenv(IMAGE, said)
    assert image_asked() == asked
