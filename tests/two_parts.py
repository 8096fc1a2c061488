# SPDX-License-Identifier: Apache-2.0
"""A run of everything in two parts: most tests beside each other, then those that measure, one at a time.

Invariant: every collected test has an outcome in one of the parts, or the run fails; so does a ring in which nothing
passed.

    pytest --together DIR -n 4 --dist loadfile --no-loadscope-reorder tests
    pytest --alone DIR tests

A test that is marked `quiet` measures time: what it says on a machine that does other things at the same time says
nothing. What fails in the first part is asked once more in the second, alone, if it is few (`MOST_REPEATED`), and that
answer counts: a test that passes alone and failed in a crowd mostly waited for too little, or not long enough. It is no
good answer, though, only one that does not throw away the other thousands: the end of the run names every such test,
DIR/not-calm.txt keeps how it failed, and it wants to be mended. What fails in the second part has failed.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from feature_matrix import FeatureMatrix

RINGS = ("unit", "golden", "hostile", "dataplane", "compat", "system")
MOST_REPEATED = 5
TOGETHER, NOT_CALM = "together.json", "not-calm.txt"
# The longest files, longest first: begun at the end, one of them would go on when all others are done. Then the rings
# from the slowest on, for the same reason.
LONGEST = (
    "system/test_kill_matrix_mariadb.py",
    "system/test_distributed.py",
    "system/test_kill_matrix.py",
    "system/test_slow_neighbours.py",
    "dataplane/test_under_load.py",
    "system/test_vips_later.py",
    "unit/store/test_upgrade.py",
    "system/test_canaries.py",
    "system/test_outages.py",
    "system/test_pairs_system.py",
    "dataplane/test_crash_points.py",
    "dataplane/test_totals.py",
    "dataplane/test_pool_encryption.py",
)


def ring(nodeid: str) -> str:
    """The folder below tests/ that a test is in."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else ""


class Outcomes:
    """What became of tests, by node id."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        # And how: what the first report of a failure said.
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
        """These for all other tests."""
        left = Outcomes()
        left.passed, left.skipped = self.passed - nodeids, self.skipped - nodeids
        left.failed = {nodeid: text for nodeid, text in self.failed.items() if nodeid not in nodeids}
        return left

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
    """The first part: whatever is not marked quiet."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / TOGETHER
        self._outcomes = Outcomes()
        self._file.unlink(missing_ok=True)

    def pytest_sessionstart(self) -> None:
        """Let SIGTERM (a job's time limit, for example) end the workers the way Ctrl-C does: with what they made."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        later = [item for item in items if item.get_closest_marker("quiet")]
        items[:] = [item for item in items if not item.get_closest_marker("quiet")]
        items.sort(key=lambda item: _turn(item.nodeid))
        config.hook.pytest_deselected(items=later)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.take(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self._outcomes.write(self._file)


class Alone:
    """The second part: tests marked quiet, what failed in the first, and the judgment of both."""

    def __init__(self, directory: Path, matrix: FeatureMatrix) -> None:
        self._not_calm = directory / NOT_CALM
        self._not_calm.unlink(missing_ok=True)
        try:
            self._together = Outcomes.read(directory / TOGETHER)
        except FileNotFoundError:
            raise pytest.UsageError(
                f"--alone: the first part did not come to its end ({directory / TOGETHER})"
            ) from None
        self._repeated = set(self._together.failed)
        self._earlier = self._together.without(self._repeated)
        self._outcomes = Outcomes()
        self._collected: set[str] = set()
        matrix.earlier(self._earlier.passed, self._earlier.skipped)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._collected = {item.nodeid for item in items}
        mine = [item for item in items if item.get_closest_marker("quiet") or item.nodeid in self._repeated]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
        if len(self._repeated) > MOST_REPEATED:
            many = f"{len(self._repeated)} tests failed: too many to be repeated"
            pytest.exit(many, returncode=int(pytest.ExitCode.TESTS_FAILED))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.take(report)

    def not_calm(self) -> list[str]:
        """Tests that passed only when they were repeated alone."""
        return sorted(self._repeated & self._outcomes.passed - set(self._outcomes.failed))

    def complaints(self) -> list[str]:
        """What is wrong with a run in which every test of this part passed."""
        rings = Counter(map(ring, self._earlier.passed | self._outcomes.passed))
        missing = [each for each in RINGS if not rings[each]]
        unjudged = sorted(self._collected - self._earlier.all - self._outcomes.all)
        gone = sorted(self._repeated - self._collected)
        skipped = sorted(self._repeated & self._outcomes.skipped - self._outcomes.passed)
        return [
            *([f"no test passed in: {', '.join(missing)}"] if missing else []),
            *(f"was run in neither part: {nodeid}" for nodeid in unjudged),
            *(f"failed, and could not be found again: {nodeid}" for nodeid in gone),
            *(f"failed, and was only skipped alone: {nodeid}" for nodeid in skipped),
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        say = session.config.get_terminal_writer().line
        if found := self.not_calm():
            self._not_calm.write_text("\n\n".join(f"not calm: {one}\n{self._together.failed[one]}" for one in found))
            say("")
            for nodeid in found:
                say(f"not calm: {nodeid} (failed beside others, passed alone; see {self._not_calm})", red=True)
        if exitstatus == pytest.ExitCode.OK and (wrong := self.complaints()):
            say("")
            for complaint in wrong:
                say(complaint, red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _turn(nodeid: str) -> tuple[int, int]:
    """When a test's file is begun, compared with others."""
    file, its_ring = nodeid.partition("::")[0].removeprefix("tests/"), ring(nodeid)
    first = LONGEST.index(file) if file in LONGEST else len(LONGEST)
    return first, -RINGS.index(its_ring) if its_ring in RINGS else -len(RINGS)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("a run in two parts")
    group.addoption("--together", metavar="DIR", type=Path, help="the first: everything that is not marked quiet")
    group.addoption("--alone", metavar="DIR", type=Path, help="the second: quiet tests, and what failed in the first")


def register(config: pytest.Config, matrix: FeatureMatrix) -> None:
    """The plugin of the part that was asked for, if any."""
    together, alone = config.getoption("--together"), config.getoption("--alone")
    if together and alone:
        raise pytest.UsageError("--together and --alone are two runs")
    if together:
        config.pluginmanager.register(Together(together), "together")
    if alone:
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--alone: without -n, one test at a time")
        config.pluginmanager.register(Alone(alone, matrix), "alone")
