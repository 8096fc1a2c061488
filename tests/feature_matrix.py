# SPDX-License-Identifier: Apache-2.0
"""Octavia's feature matrix, written from the tests that prove it.

Invariant: a line is `complete` only if at least one test is marked with it, and every such test ran and passed. A
marker with an unknown line ends the collection.

    @pytest.mark.feature("listener.protocol.HTTP", "listener.protocol_port")
    @pytest.mark.feature_partly("listener.timeout-tcp-inspect")  # accepted, but without its full effect

Lines are `<file>.<key>`: the files and keys of Octavia's doc/source/user/feature-classification/feature-matrix-*.ini.
`--feature-matrix DIR` writes the values of `driver.haproxy` for each of these files, in the second part of a complete
run (`two_parts.py`). Outcomes come from both parts, and markers from the collection, which is always complete. The
committed files are in docs/feature-matrix; tests/unit/test_feature_matrix.py compares them with the markers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from haproxy_versions import NEWER

_LINES = {
    "lb": (
        "additional_vips admin_state_up availability_zone description flavor name stats status tags vip_address"
        " vip_network_id vip_port_id vip_qos_policy_id vip_sg_id vip_subnet_id"
    ),
    "listener": (
        "admin_state_up allowed_cidr alpn_protocol client_authentication client_ca_tls_container_ref"
        " client_crl_container_ref connection_limit default_tls_container_ref description"
        " insert_headers.X-Forwarded-For insert_headers.X-Forwarded-Port insert_headers.X-Forwarded-Proto"
        " insert_headers.X-SSL-Client-Verify insert_headers.X-SSL-Client-Has-Cert insert_headers.X-SSL-Client-DN"
        " insert_headers.X-SSL-Client-CN insert_headers.X-SSL-Issuer insert_headers.X-SSL-Client-SHA1"
        " insert_headers.X-SSL-Client-Not-Before insert_headers.X-SSL-Client-Not-After name protocol.HTTP"
        " protocol.HTTPS protocol.TCP protocol.TERMINATED_HTTPS protocol.UDP protocol.SCTP protocol.PROMETHEUS"
        " protocol_port sni_container_refs stats tags timeout_client_data timeout_member_connect"
        " timeout-member-data timeout-tcp-inspect tls_ciphers tls_versions"
    ),
    "pool": (
        "admin_state_up alpn_protocol ca_tls_container_ref crl_container_ref lb_algorithm.LEAST_CONNECTIONS"
        " lb_algorithm.ROUND_ROBIN lb_algorithm.SOURCE_IP lb_algorithm.SOURCE_IP_PORT description name protocol.HTTP"
        " protocol.HTTPS protocol.PROXY protocol.PROXYV2 protocol.TCP protocol.UDP protocol.SCTP"
        " session_persistence.APP_COOKIE session_persistence.cookie_name session_persistence.HTTP_COOKIE"
        " session_persistence.persistence_timeout session_persistence.persistence_granularity"
        " session_persistence.SOURCE_IP tags tls_ciphers tls_container_ref tls_enabled tls_versions"
    ),
    "member": (
        "admin_state_up address backup batch monitor_address monitor_port name protocol_port subnet_id tags weight"
    ),
    "healthmonitor": (
        "admin_state_up delay domain_name expected_codes http_method http_version name max_retries max_retries_down"
        " tags timeout type.HTTP type.HTTPS type.PING type.TCP type.TLS-HELLO type.UDP-CONNECT type.SCTP url_path"
    ),
    "l7policy": (
        "action.REDIRECT_TO_POOL action.REDIRECT_TO_PREFIX action.REDIRECT_TO_URL action.REJECT admin_state_up"
        " description name position redirect_http_code redirect_pool_id redirect_prefix redirect_url tags"
    ),
    "l7rule": (
        "admin_state_up compare_type.CONTAINS compare_type.ENDS_WITH compare_type.EQUAL_TO compare_type.REGEX"
        " compare_type.STARTS_WITH invert key tags type.COOKIE type.FILE_TYPE type.HEADER type.HOST_NAME type.PATH"
        " type.SSL_CONN_HAS_CERT type.SSL_VERIFY_RESULT type.SSL_DN_FIELD value"
    ),
}
LINES = {kind: tuple(keys.split()) for kind, keys in _LINES.items()}
KNOWN = {f"{kind}.{key}" for kind, keys in LINES.items() for key in keys}
COMPLETE, PARTIAL, MISSING = "complete", "partial", "missing"


def file_name(kind: str) -> str:
    return f"feature-matrix-{kind}.ini"


def written(kind: str, verdicts: dict[str, str]) -> str:
    """Return the section of the haproxy driver in Octavia's file of the same name."""
    sections = [f"[operation.{key}]\ndriver.haproxy={verdicts.get(f'{kind}.{key}', MISSING)}\n" for key in LINES[kind]]
    return "\n".join(["# Written by the tests (tests/feature_matrix.py), not by hand.\n", *sections])


class FeatureMatrix:
    """The plugin: collects markers, then outcomes."""

    def __init__(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "feature(*lines): lines of Octavia's feature matrix that the test proves")
        config.addinivalue_line("markers", "feature_partly(*lines): the same for lines that no test proves completely")
        self._directory = config.getoption("--feature-matrix")
        if self._directory is not None and config.getoption("numprocesses", None):
            # Only the workers collect, and none of them has all outcomes.
            raise pytest.UsageError("--feature-matrix: not with -n")
        self._marked: dict[str, set[str]] = defaultdict(set)
        self._partly: set[str] = set()
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def earlier(self, passed: Iterable[str], skipped: Iterable[str]) -> None:
        """Add the outcomes of an earlier part of the run, by node id."""
        self._passed.update(passed)
        self._failed.update(skipped)

    # The wrapper sees items before any other plugin deselects some.
    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Collect markers before a deselection, because a marked test that does not run is no proof."""
        self._note(items)
        return (yield)

    def _note(self, items: list[pytest.Item]) -> None:
        for item in items:
            partly = list(item.iter_markers("feature_partly"))
            self._partly.update(line for marker in partly for line in marker.args)
            for marker in (*item.iter_markers("feature"), *partly):
                if unknown := [line for line in marker.args if line not in KNOWN]:
                    raise pytest.UsageError(f"{item.nodeid}: the feature matrix has no line {', '.join(unknown)}")
                for line in marker.args:
                    self._marked[line].add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif not report.passed:
            self._failed.add(report.nodeid)

    def verdicts(self) -> dict[str, str]:
        """Return the status of every line that has tests."""
        good = self._passed - self._failed
        found = {}
        for line, tests in self._marked.items():
            whole = {each for each in tests if not _is_unavailable(each)} <= good and line not in self._partly
            found[line] = COMPLETE if whole else PARTIAL if tests & good else MISSING
        return found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._directory is None:
            return
        verdicts = self.verdicts()
        directory = Path(self._directory)
        directory.mkdir(parents=True, exist_ok=True)
        for kind in LINES:
            (directory / file_name(kind)).write_text(written(kind, verdicts))


def _is_unavailable(nodeid: str) -> bool:
    """Return whether a test needs a missing HAProxy version; the other versions are sufficient."""
    missing = {each.series for each in NEWER if each.program is None}
    return not missing.isdisjoint(nodeid.partition("[")[2].rstrip("]").split("-"))


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("feature matrix")
    group.addoption("--feature-matrix", metavar="DIR", help="write Octavia's feature matrix according to these tests")
