# SPDX-License-Identifier: Apache-2.0
"""HAProxy's statistics as Prometheus metrics: names, labels, values and format."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from amphora_agent.errors import HaproxyError
from amphora_agent.responder import prometheus
from amphora_agent.responder.metric_families import CPU, MEMORY, PROCESS, STATISTICS
from amphora_agent.stats import former_workers
from amphora_agent.stats.former_workers import COUNTED

# Dashboards for Octavia's PROMETHEUS listeners use these names.
DOCUMENTED = [
    "octavia_listener_bytes_in_total",
    "octavia_listener_bytes_out_total",
    "octavia_listener_connections_rate_max",
    "octavia_listener_connections_total",
    "octavia_listener_current_sessions",
    "octavia_listener_denied_connections_total",
    "octavia_listener_denied_sessions_total",
    "octavia_listener_failed_header_rewriting_total",
    "octavia_listener_http_cache_hits_total",
    "octavia_listener_http_cache_lookups_total",
    "octavia_listener_http_comp_bytes_bypassed_total",
    "octavia_listener_http_comp_bytes_in_total",
    "octavia_listener_http_comp_bytes_out_total",
    "octavia_listener_http_comp_responses_total",
    "octavia_listener_http_requests_rate_max",
    "octavia_listener_http_requests_total",
    "octavia_listener_http_responses_total",
    "octavia_listener_intercepted_requests_total",
    "octavia_listener_limit_session_rate",
    "octavia_listener_limit_sessions",
    "octavia_listener_max_session_rate",
    "octavia_listener_max_sessions",
    "octavia_listener_request_errors_total",
    "octavia_listener_requests_denied_total",
    "octavia_listener_responses_denied_total",
    "octavia_listener_sessions_total",
    "octavia_listener_status",
    "octavia_loadbalancer_connections_total",
    "octavia_loadbalancer_cpu",
    "octavia_loadbalancer_current_backend_ssl_key_rate",
    "octavia_loadbalancer_current_connection_rate",
    "octavia_loadbalancer_current_connections",
    "octavia_loadbalancer_current_frontend_ssl_key_rate",
    "octavia_loadbalancer_current_session_rate",
    "octavia_loadbalancer_current_ssl_connections",
    "octavia_loadbalancer_current_ssl_rate",
    "octavia_loadbalancer_dropped_logs_total",
    "octavia_loadbalancer_frontend_ssl_reuse",
    "octavia_loadbalancer_http_comp_bytes_in_total",
    "octavia_loadbalancer_http_comp_bytes_out_total",
    "octavia_loadbalancer_limit_connection_rate",
    "octavia_loadbalancer_limit_http_comp",
    "octavia_loadbalancer_limit_session_rate",
    "octavia_loadbalancer_limit_ssl_rate",
    "octavia_loadbalancer_listeners",
    "octavia_loadbalancer_max_backend_ssl_key_rate",
    "octavia_loadbalancer_max_connection_rate",
    "octavia_loadbalancer_max_connections",
    "octavia_loadbalancer_max_frontend_ssl_key_rate",
    "octavia_loadbalancer_max_session_rate",
    "octavia_loadbalancer_max_ssl_connections",
    "octavia_loadbalancer_max_ssl_rate",
    "octavia_loadbalancer_memory",
    "octavia_loadbalancer_requests_total",
    "octavia_loadbalancer_ssl_cache_lookups_total",
    "octavia_loadbalancer_ssl_cache_misses_total",
    "octavia_loadbalancer_ssl_connections_total",
    "octavia_member_bytes_in_total",
    "octavia_member_bytes_out_total",
    "octavia_member_check_failures_total",
    "octavia_member_check_last_change_seconds",
    "octavia_member_check_up_down_total",
    "octavia_member_client_aborts_total",
    "octavia_member_connect_time_average_seconds",
    "octavia_member_connection_attempts_total",
    "octavia_member_connection_errors_total",
    "octavia_member_connection_reuses_total",
    "octavia_member_current_queue",
    "octavia_member_current_sessions",
    "octavia_member_current_throttle",
    "octavia_member_downtime_seconds_total",
    "octavia_member_failed_header_rewriting_total",
    "octavia_member_http_responses_total",
    "octavia_member_idle_connections_current",
    "octavia_member_idle_connections_limit",
    "octavia_member_last_session_seconds",
    "octavia_member_limit_sessions",
    "octavia_member_loadbalanced_total",
    "octavia_member_max_connect_time_seconds",
    "octavia_member_max_queue",
    "octavia_member_max_queue_time_seconds",
    "octavia_member_max_response_time_seconds",
    "octavia_member_max_session_rate",
    "octavia_member_max_sessions",
    "octavia_member_max_total_time_seconds",
    "octavia_member_queue_limit",
    "octavia_member_queue_time_average_seconds",
    "octavia_member_redispatch_warnings_total",
    "octavia_member_response_errors_total",
    "octavia_member_response_time_average_seconds",
    "octavia_member_responses_denied_total",
    "octavia_member_retry_warnings_total",
    "octavia_member_server_aborts_total",
    "octavia_member_sessions_total",
    "octavia_member_status",
    "octavia_member_total_time_average_seconds",
    "octavia_member_weight",
    "octavia_memory_pool_allocated_bytes",
    "octavia_memory_pool_failures_total",
    "octavia_memory_pool_used_bytes",
    "octavia_pool_active_members",
    "octavia_pool_backup_members",
    "octavia_pool_bytes_in_total",
    "octavia_pool_bytes_out_total",
    "octavia_pool_check_last_change_seconds",
    "octavia_pool_check_up_down_total",
    "octavia_pool_client_aborts_total",
    "octavia_pool_connect_time_average_seconds",
    "octavia_pool_connection_attempts_total",
    "octavia_pool_connection_errors_total",
    "octavia_pool_connection_reuses_total",
    "octavia_pool_current_queue",
    "octavia_pool_current_sessions",
    "octavia_pool_downtime_seconds_total",
    "octavia_pool_failed_header_rewriting_total",
    "octavia_pool_http_cache_hits_total",
    "octavia_pool_http_cache_lookups_total",
    "octavia_pool_http_comp_bytes_bypassed_total",
    "octavia_pool_http_comp_bytes_in_total",
    "octavia_pool_http_comp_bytes_out_total",
    "octavia_pool_http_comp_responses_total",
    "octavia_pool_http_requests_total",
    "octavia_pool_http_responses_total",
    "octavia_pool_last_session_seconds",
    "octavia_pool_limit_sessions",
    "octavia_pool_loadbalanced_total",
    "octavia_pool_max_connect_time_seconds",
    "octavia_pool_max_queue",
    "octavia_pool_max_queue_time_seconds",
    "octavia_pool_max_response_time_seconds",
    "octavia_pool_max_session_rate",
    "octavia_pool_max_sessions",
    "octavia_pool_max_total_time_seconds",
    "octavia_pool_member_aborts_total",
    "octavia_pool_queue_time_average_seconds",
    "octavia_pool_redispatch_warnings_total",
    "octavia_pool_requests_denied_total",
    "octavia_pool_response_errors_total",
    "octavia_pool_response_time_average_seconds",
    "octavia_pool_responses_denied_total",
    "octavia_pool_retry_warnings_total",
    "octavia_pool_sessions_total",
    "octavia_pool_status",
    "octavia_pool_total_time_average_seconds",
]
INFO = """Name: HAProxy
Pid: 7
CumReq: 6
PoolAlloc_bytes: 389392
Idle_pct: 100
Unstoppable Jobs: 0
Build info: 2.6.12
"""
COLUMNS = (
    "# pxname,svname,scur,slim,bin,status,weight,act,type,throttle,check_status,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,"
    "hrsp_5xx,hrsp_other,req_tot,srv_abrt,last_chk,qtime,mode,"
)


def answer(*rows):
    return "\n".join((INFO, COLUMNS, *rows, "", INFO, ""))


def row(proxy, name, status, kind, *, mode="http", scur="0", last_chk="", qtime="0", bin_="0"):
    responses = "1,2,3,4,5,6" if mode == "http" else ",,,,,"
    return f"{proxy},{name},{scur},,{bin_},{status},1,1,{kind},,,{responses},9,3,{last_chk},{qtime},{mode},"


def samples(*rows):
    text = "".join(prometheus.exposition(answer(*rows), load=12.34, memory=56.78))
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_the_metric_names_are_the_documented_ones():
    families = [CPU, MEMORY, *PROCESS, *(family for group in STATISTICS.values() for family in group)]
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert sorted(names) == DOCUMENTED


def test_every_family_is_declared_once_even_without_objects():
    text = "".join(prometheus.exposition(answer(), load=0, memory=0))
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    described = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP ")]
    assert sorted(declared) == sorted(described) == DOCUMENTED
    assert {family.name for family in text_string_to_metric_families(text)} == {
        name.removesuffix("_total") for name in DOCUMENTED
    }


def test_listeners_pools_and_members_have_their_own_labels():
    found = samples(
        row("l", "FRONTEND", "OPEN", 0, scur="4"),
        row("p:l", "m", "UP", 2, scur="5"),
        row("p:l", "BACKEND", "UP", 1, scur="6"),
    )
    assert found["octavia_listener_current_sessions", ("listener", "l")] == 4
    assert found["octavia_member_current_sessions", ("member", "m"), ("pool", "p:l")] == 5
    assert found["octavia_pool_current_sessions", ("pool", "p:l")] == 6
    assert found["octavia_pool_active_members", ("pool", "p:l")] == 1
    assert found["octavia_pool_member_aborts_total", ("pool", "p:l")] == 3
    assert found["octavia_member_server_aborts_total", ("member", "m"), ("pool", "p:l")] == 3
    assert found["octavia_member_http_responses_total", ("code", "4xx"), ("member", "m"), ("pool", "p:l")] == 4


def test_metrics_of_the_load_balancer():
    found = samples()
    assert found["octavia_loadbalancer_cpu",] == 12.3
    assert found["octavia_loadbalancer_memory",] == 56.8
    assert found["octavia_loadbalancer_requests_total",] == 6
    assert found["octavia_memory_pool_allocated_bytes",] == 389392


@pytest.mark.parametrize(
    ("kind", "said", "state"),
    [
        (2, "UP", "UP"),
        (2, "UP 1/3", "UP"),
        (2, "no check", "UP"),
        (2, "DOWN", "DOWN"),
        (2, "DOWN 1/2", "DOWN"),
        (2, "DOWN (agent)", "DOWN"),
        (2, "MAINT", "MAINT"),
        (2, "MAINT (resolution)", "MAINT"),
        (2, "DRAIN", "DRAIN"),
        (2, "DRAIN 1/3", "DRAIN"),
        (2, "NOLB", "NOLB"),
        (1, "DOWN", "DOWN"),
        (0, "OPEN", "UP"),
        (0, "FULL", "UP"),
        (0, "STOP", "DOWN"),
    ],
)
def test_exactly_one_state_is_set(kind, said, state):
    states = {
        dict(labels)["state"]: value
        for (name, *labels), value in samples(row("x", "y", said, kind)).items()
        if name.endswith("_status")
    }
    assert {name for name, value in states.items() if value} == {state}
    assert set(states) == ({"DOWN", "UP", "MAINT", "DRAIN", "NOLB"} if kind == 2 else {"DOWN", "UP"})


def test_milliseconds_become_seconds():
    found = samples(row("p", "m", "UP", 2, qtime="1234"), row("p", "n", "UP", 2, qtime=""))
    assert found["octavia_member_queue_time_average_seconds", ("member", "m"), ("pool", "p")] == 1.234
    unknown = found["octavia_member_queue_time_average_seconds", ("member", "n"), ("pool", "p")]
    assert math.isnan(unknown)


def test_missing_values_are_nan():
    value = samples(row("p", "m", "UP", 2))["octavia_member_limit_sessions", ("member", "m"), ("pool", "p")]
    assert math.isnan(value)


def test_tcp_pools_have_no_http_metrics():
    found = samples(row("a", "m", "UP", 2, mode="tcp"), row("b", "m", "UP", 2))
    pools = {dict(labels)["pool"] for name, *labels in found if name == "octavia_member_http_responses_total"}
    assert pools == {"b"}
    assert ("octavia_member_bytes_in_total", ("member", "m"), ("pool", "a")) in found


def test_internal_sections_are_not_shown():
    found = samples(row("amphora:metrics", "responder", "UP", 2), row("amphora:metrics", "BACKEND", "UP", 1))
    assert not any("amphora:" in value for _, *labels in found for _, value in labels)


def test_check_texts_of_members_do_not_shift_columns():
    said = '"HTTP status check returned code ""404"", sorry, not found"'
    found = samples(row("p", "m", "DOWN", 2, last_chk=said, qtime="5"))
    assert found["octavia_member_queue_time_average_seconds", ("member", "m"), ("pool", "p")] == 0.005


def test_labels_are_escaped():
    name = 'quoted "backslash" \\ %s {} }'
    found = samples(row(f'"{name.replace(chr(34), chr(34) * 2)}"', "m", "UP", 2, scur="3"))
    assert found["octavia_member_current_sessions", ("member", "m"), ("pool", name)] == 3


class Worker:
    """Returns the answers in turn; an exception is raised."""

    def __init__(self, *answers):
        self._answers = iter(answers)

    def ask(self, question):
        said = next(self._answers)
        if isinstance(said, Exception):
            raise said
        return said


def test_a_request_to_an_ending_worker_is_repeated():
    whole = answer(row("l", "FRONTEND", "OPEN", 0))
    gone = HaproxyError("ask", "connection reset")
    stopping = whole.replace("Pid: 7", "Pid: 7\nStopping: 1").replace("OPEN", "STOP")
    begins_to_stop = INFO.join((*whole.replace("OPEN", "STOP").split(INFO)[:2], INFO + "Stopping: 1\n\n"))
    for broken in ("", whole[: len(INFO)], whole[:-5], stopping, begins_to_stop, gone):
        text = "".join(prometheus.scrape(Worker(broken, whole)))
        assert 'octavia_listener_current_sessions{listener="l"} 0\n' in text
        assert 'octavia_listener_status{listener="l",state="UP"} 1\n' in text


def test_requests_are_repeated_until_the_pause_of_a_reload_ends(monkeypatch):
    whole = answer(row("l", "FRONTEND", "OPEN", 0))
    monkeypatch.setattr(prometheus, "_POLL_SECONDS", 0.001)
    pause = [HaproxyError("ask", "connection refused")] * 20
    assert "octavia_listener_status" in "".join(prometheus.scrape(Worker(*pause, whole)))


def test_a_missing_worker_is_an_error_before_the_first_byte(monkeypatch):
    monkeypatch.setattr(prometheus, "ASK_SECONDS", 0.05)
    with pytest.raises(HaproxyError, match="reset"):
        prometheus.scrape(Worker(*[HaproxyError("ask", "connection reset")] * 99))
    with pytest.raises(HaproxyError, match="its worker is stopping"):
        prometheus.scrape(Worker(*["Pid: 7\n"] * 99))


def test_former_workers_add_to_counters_only(tmp_path):
    whole = answer(
        row("l", "FRONTEND", "OPEN", 0, scur="4", bin_="5"),
        row("p:l", "m", "UP", 2, scur="5", bin_="6"),
        row("p:l", "new", "UP", 2, bin_="7"),
    )
    sums = tmp_path / "earlier"
    row_of = {name: place for place, name in enumerate(COUNTED)}
    counts = [0] * len(COUNTED)
    counts[row_of["bin"]], counts[row_of["hrsp_2xx"]] = 1000, 30
    sums.write_text(former_workers.compose(7, {"l,FRONTEND": counts, "p:l,m": counts, "p:l,gone": counts}))
    text = "".join(prometheus.scrape(Worker(whole), str(sums)))
    for line in (
        'octavia_listener_bytes_in_total{listener="l"} 1005',
        'octavia_listener_current_sessions{listener="l"} 4',
        'octavia_member_bytes_in_total{pool="p:l",member="m"} 1006',
        'octavia_member_bytes_in_total{pool="p:l",member="new"} 7',
        'octavia_member_http_responses_total{pool="p:l",member="m",code="2xx"} 32',
    ):
        assert f"\n{line}\n" in text
    assert "gone" not in text


def test_counters_that_would_reset_are_not_shown(tmp_path, monkeypatch):
    """The sums file is missing or belongs to another worker. No answer is better than an apparent restart."""
    whole = answer(row("l", "FRONTEND", "OPEN", 0))
    monkeypatch.setattr(prometheus, "SUMS_SECONDS", 0.05)
    for content in (None, former_workers.compose(8, {}), ""):
        if content is not None:
            (tmp_path / "earlier").write_text(content)
        with pytest.raises(HaproxyError, match="former workers"):
            prometheus.scrape(Worker(*[whole] * 99), str(tmp_path / "earlier"))
