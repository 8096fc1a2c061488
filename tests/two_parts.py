# SPDX-License-Identifier: Apache-2.0
"""A run of all tests in two parts: most tests in parallel, then one at a time the quiet tests.

Invariant: every selected test has an outcome in one of the parts, or the run fails. A ring in which no test passed
fails the run too.

    pytest --together DIR -n 4 --dist loadfile --no-loadscope-reorder tests
    pytest --alone DIR tests
    pytest --again DIR tests          if the second part failed

Without `--all` the parts omit tests marked `extended`. Tests marked `quiet` measure time, and run in the second part.

A test that fails in the first part gets a second attempt in the second part, if at most `MOST_REPEATED` tests failed.
A test that first fails in the second part gets a second attempt in a new process, if at most `MOST_ASKED_AGAIN` tests
failed. That process waits until the machine is idle. A test that fails twice has failed.

The end of a run names each test that passed at its second attempt, and DIR/second-attempts.txt keeps its failure.
`tests/second-attempts.txt` lists the tests that have needed one in an earlier run. A test on the list gets no second
attempt: its failure fails the run, until its cause is fixed and the entry is removed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from feature_matrix import FeatureMatrix

IMAGE = "AMPHORA_IMAGE"
"""The variable that selects tests of the image's ring with `--all`: 0 none, `all` all, else the quick tests."""
KNOWN_SECOND_ATTEMPTS = Path(__file__).parent / "second-attempts.txt"


def image_asked() -> str:
    """Return the value of this environment variable, by default 1; empty for 0."""
    said = os.environ.get(IMAGE) or "1"
    return "" if said == "0" else said


RINGS = ("unit", "golden", "hostile", "dataplane", "compat", "system", "cluster", "openstack")


def rings(config: pytest.Config) -> tuple[str, ...]:
    """Return the rings in which at least one test must pass."""
    return (*RINGS, "image") if config.getoption("all") and image_asked() else RINGS


def selected(item: pytest.Item) -> bool:
    """Return whether the run includes a test: with `--all` any test, else a test not marked `extended`."""
    return bool(item.config.getoption("all")) or not item.get_closest_marker("extended")


def known_second_attempts() -> set[str]:
    """Return the test ids on the list.

    An entry is one line: the id, and after ` # ` the date and the known facts.
    """
    text = KNOWN_SECOND_ATTEMPTS.read_text(encoding="utf-8")
    lines = (line.partition("  # ")[0].strip() for line in text.splitlines())
    return {line for line in lines if line and not line.startswith("#")}


MOST_REPEATED, MOST_ASKED_AGAIN = 5, 3
TOGETHER, ALONE, SECOND_ATTEMPTS = "together.json", "alone.json", "second-attempts.txt"
# The maximum wait for an idle machine in seconds, and the limits of an idle machine. The first limit is the share (%)
# of the last ten seconds in which a process waited for a processor (Documentation/accounting/psi.rst of the kernel).
# Without it, the limit is running processes per processor in the last minute (proc(5), /proc/loadavg).
CALM_SECONDS, CALM_PRESSURE, CALM_LOAD = 120.0, 10.0, 0.5
# Files that one worker runs, because each start of their cloud costs processor time: 8 and 64 seconds.
SHARED_CLOUD = tuple(f"openstack/test_neutron{name}.py" for name in ("", "_adoption", "_fleet", "_ownership", "_races"))
WHOLE_CLOUD = tuple(
    f"openstack/test_{name}.py"
    for name in (
        *("cloud", "cloud_libvirt", "cloud_operations", "cloud_placement", "cloud_requests"),
        *("cluster", "cluster_heat", "cluster_scenarios", "nova", "nova_fleet", "nova_machines"),
        # The last one, because it adds Octavia's own provider.
        "cloud_adoption",
    )
)
# The longest files, longest first, because a long file that starts last would run alone at the end. The rings follow
# from the slowest on, for the same reason.
LONGEST = (
    *WHOLE_CLOUD,
    "system/test_set_clock.py",
    "system/test_kill_matrix_mariadb.py",
    "system/test_kill_failover.py",
    "system/test_rotation_system.py",
    "system/test_certificates_rotation.py",
    "system/test_updates.py",
    "system/test_kill_matrix.py",
    "system/test_detection_system.py",
    "system/test_outages.py",
    "system/test_failover.py",
    "system/test_operators_worse.py",
    "system/test_backends.py",
    "system/test_tls.py",
    "system/test_udp_system.py",
    "system/test_controllers.py",
    "system/test_load_balancer.py",
    "system/test_pairs_system.py",
    "system/test_transactions.py",
    "system/test_vips.py",
    "system/test_drift_system.py",
    "system/test_distributed.py",
    "system/test_whole_model.py",
    "system/test_operators.py",
    "unit/kill_points/test_kill_points.py",
    "dataplane/test_drift.py",
    "dataplane/test_crash_points.py",
    "dataplane/test_pool_encryption.py",
    "dataplane/test_systemd.py",
    "dataplane/test_totals.py",
    "dataplane/test_under_load.py",
    "unit/store/test_upgrade.py",
)


def scheduler(config: pytest.Config, log: object) -> object:
    """Return the scheduler of `--dist loadfile`, which gives the files that share a cloud to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    # Runs without workers do not need the plug-in.
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415

    class Scheduling(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            """Assign files until the worker has two tests, because it begins a test when it knows the next one.

            xdist assigns one file, also to the replacement of a worker that a test has ended. With one test or none
            left in this file, the replacement would wait for ever.
            """
            super()._assign_work_unit(node)
            while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
                super()._assign_work_unit(node)

        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            name = file.removeprefix("tests/")
            return next((shared[0] for shared in (SHARED_CLOUD, WHOLE_CLOUD) if name in shared), file)

    return Scheduling(config, log)


def ring(nodeid: str) -> str:
    """Return the folder below tests/ that contains a test."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else ""


class Outcomes:
    """The outcomes of tests, by node id."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        # The text of the first failure report.
        self.failed: dict[str, str] = {}

    def take(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, f"{report.when}:\n{report.longreprtext}")
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    @property
    def all(self) -> set[str]:
        return self.passed | self.skipped | set(self.failed)

    def without(self, nodeids: set[str]) -> Outcomes:
        """Return the outcomes of all other tests."""
        left = Outcomes()
        left.passed, left.skipped = self.passed - nodeids, self.skipped - nodeids
        left.failed = {nodeid: text for nodeid, text in self.failed.items() if nodeid not in nodeids}
        return left

    def and_those(self, others: Outcomes) -> Outcomes:
        """Return the union with other outcomes."""
        both = Outcomes()
        both.passed, both.skipped = self.passed | others.passed, self.skipped | others.skipped
        both.failed = {**others.failed, **self.failed}
        return both

    def write(self, file: Path) -> None:
        found = {"passed": sorted(self.passed), "skipped": sorted(self.skipped), "failed": self.failed}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1))

    @classmethod
    def read(cls, file: Path) -> Outcomes:
        found, made = json.loads(file.read_text()), cls()
        made.passed, made.skipped, made.failed = set(found["passed"]), set(found["skipped"]), found["failed"]
        return made


class Together:
    """The first part: all tests that are not marked quiet."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / TOGETHER
        self._outcomes = Outcomes()
        self._file.unlink(missing_ok=True)
        (directory / ALONE).unlink(missing_ok=True)

    def pytest_sessionstart(self) -> None:
        """Let SIGTERM, for example after a job's time limit, end the workers as Ctrl-C does."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        now = [item for item in items if selected(item) and not item.get_closest_marker("quiet")]
        config.hook.pytest_deselected(items=[item for item in items if item not in now])
        items[:] = sorted(now, key=lambda item: _turn(item.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.take(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self._outcomes.write(self._file)


class _Repeating:
    """A part that repeats the failed tests of the previous part, and evaluates all outcomes.

    Args:
        earlier: outcomes that remain valid.
        repeated: the tests to repeat, with their failures.
        most: the maximum number of repeated tests; above it, no test is repeated.
        how: a description of the difference between the two attempts.
    """

    def __init__(
        self,
        directory: Path,
        matrix: FeatureMatrix,
        *,
        earlier: Outcomes,
        repeated: dict[str, str],
        most: int,
        how: str,
    ) -> None:
        self._record = directory / SECOND_ATTEMPTS
        self._earlier, self._repeated, self._most, self._how = earlier, repeated, most, how
        self._listed = known_second_attempts()
        self._outcomes = Outcomes()
        self._collected: set[str] = set()
        self._rings = RINGS
        matrix.earlier(earlier.passed, earlier.skipped)

    def _is_mine(self, item: pytest.Item) -> bool:
        return item.nodeid in self._repeated

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._rings = rings(config)
        self._collected = {item.nodeid for item in items if selected(item)}
        mine = [item for item in items if selected(item) and self._is_mine(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
        if len(self._repeated) > self._most:
            many = f"{len(self._repeated)} tests failed: too many to be repeated"
            pytest.exit(many, returncode=int(pytest.ExitCode.TESTS_FAILED))
        if again := sorted(self._listed & self._repeated.keys()):
            known = f"on the list of tests/second-attempts.txt, and failed again: {', '.join(again)}"
            pytest.exit(known, returncode=int(pytest.ExitCode.TESTS_FAILED))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.take(report)

    def second_attempts(self) -> list[str]:
        """Return the tests that passed at their second attempt."""
        return sorted(self._repeated.keys() & self._outcomes.passed - set(self._outcomes.failed))

    def repeated_in_vain(self) -> list[str]:
        """Return the tests that failed and did not pass at a second attempt."""
        gone = sorted(self._repeated.keys() - self._collected)
        skipped = sorted(self._repeated.keys() & self._outcomes.skipped - self._outcomes.passed)
        return [
            *(f"failed, and could not be found again: {nodeid}" for nodeid in gone),
            *(f"failed, and was only skipped when it was repeated: {nodeid}" for nodeid in skipped),
        ]

    def complaints(self) -> list[str]:
        """Return the errors of a run in which every test of this part passed."""
        passed = Counter(map(ring, self._earlier.passed | self._outcomes.passed))
        missing = [each for each in self._rings if not passed[each]]
        unjudged = sorted(self._collected - self._earlier.all - self._outcomes.all)
        return [
            *([f"no test passed in: {', '.join(missing)}"] if missing else []),
            *(f"was run in neither part: {nodeid}" for nodeid in unjudged),
            *self.repeated_in_vain(),
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        say = session.config.get_terminal_writer().line
        if found := self.second_attempts():
            with self._record.open("a") as file:
                file.writelines(f"second attempt: {one} ({self._how})\n{self._repeated[one]}\n\n" for one in found)
            say("")
            for nodeid in found:
                say(f"passed at the second attempt: {nodeid} ({self._how}; see {self._record})", red=True)
            say("Find the cause, or add these tests to tests/second-attempts.txt.", red=True)
        if exitstatus == pytest.ExitCode.OK and (wrong := self.complaints()):
            say("")
            for complaint in wrong:
                say(complaint, red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


class Alone(_Repeating):
    """The second part: tests marked quiet, failed tests of the first part, and the result of both."""

    def __init__(self, directory: Path, matrix: FeatureMatrix) -> None:
        (directory / SECOND_ATTEMPTS).unlink(missing_ok=True)
        self._file = directory / ALONE
        self._file.unlink(missing_ok=True)
        together = _read(directory / TOGETHER, "--alone: the first part")
        failed = together.failed
        earlier, how = together.without(set(failed)), "failed in parallel, passed alone"
        super().__init__(directory, matrix, earlier=earlier, repeated=failed, most=MOST_REPEATED, how=how)

    def _is_mine(self, item: pytest.Item) -> bool:
        return bool(item.get_closest_marker("quiet")) or super()._is_mine(item)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        super().pytest_sessionfinish(session, exitstatus)
        # A second attempt needs all results of this part. A run that fails for another reason ends here.
        failed = set(self._outcomes.failed)
        first = failed and not failed & self._repeated.keys() and not self.repeated_in_vain()
        if exitstatus == pytest.ExitCode.TESTS_FAILED and first:
            self._outcomes.write(self._file)


class Again(_Repeating):
    """Tests that failed in the second part for the first time, on an idle machine."""

    def __init__(self, directory: Path, matrix: FeatureMatrix, calm: Callable[[], object] | None = None) -> None:
        alone = _read(directory / ALONE, "--again: nothing is asked again, the second part")
        together = _read(directory / TOGETHER, "--again: the first part")
        self._calm = calm or await_calm
        failed = alone.failed
        earlier = together.without(set(together.failed)).and_those(alone.without(set(failed)))
        how = "failed alone, passed on an idle machine"
        super().__init__(directory, matrix, earlier=earlier, repeated=failed, most=MOST_ASKED_AGAIN, how=how)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """Wait for an idle machine before the first test runs."""
        self._calm()


def await_calm() -> bool:
    """Wait a limited time until the machine is idle; return whether it is."""
    deadline = time.monotonic() + CALM_SECONDS
    while not is_calm():
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return True


def is_calm(pressure: Path = Path("/proc/pressure/cpu"), load: Path = Path("/proc/loadavg")) -> bool:
    """Return whether the load of the last seconds is low according to the kernel."""
    try:
        words = pressure.read_text().split()
    except OSError:  # a kernel without PSI; some report that only when the file is read
        return float(load.read_text().split()[0]) <= CALM_LOAD * (os.cpu_count() or 1)
    return float(words[1].removeprefix("avg10=")) <= CALM_PRESSURE


def _read(file: Path, which: str) -> Outcomes:
    try:
        return Outcomes.read(file)
    except FileNotFoundError:
        raise pytest.UsageError(f"{which} did not come to an end that can be judged ({file})") from None


def _turn(nodeid: str) -> tuple[int, int]:
    """Return the rank of a test's file in the order of starts."""
    file, its_ring = nodeid.partition("::")[0].removeprefix("tests/"), ring(nodeid)
    first = LONGEST.index(file) if file in LONGEST else len(LONGEST)
    return first, -RINGS.index(its_ring) if its_ring in RINGS else -len(RINGS)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("a run in two parts")
    group.addoption("--all", action="store_true", help="the parts include tests marked `extended`")
    group.addoption("--together", metavar="DIR", type=Path, help="the first: all tests that are not marked quiet")
    group.addoption("--alone", metavar="DIR", type=Path, help="the second: quiet tests, and failed tests of the first")
    group.addoption("--again", metavar="DIR", type=Path, help="failed tests of the second, if they may be repeated")


def register(config: pytest.Config, matrix: FeatureMatrix) -> None:
    """Register the plugin of the requested part, if any."""
    parts = {name: config.getoption(f"--{name}") for name in ("together", "alone", "again")}
    asked = [name for name, directory in parts.items() if directory]
    if len(asked) > 1:
        raise pytest.UsageError(f"--{' and --'.join(asked)} cannot be combined")
    for name in asked:
        if name == "together":
            config.pluginmanager.register(Together(parts[name]), name)
        elif config.getoption("numprocesses", None):
            raise pytest.UsageError(f"--{name}: without -n, one test at a time")
        else:
            config.pluginmanager.register((Alone if name == "alone" else Again)(parts[name], matrix), name)
