# SPDX-License-Identifier: Apache-2.0
"""The metrics that Octavia documents for PROMETHEUS listeners, and their columns in HAProxy's answers."""

from __future__ import annotations

from enum import Enum


class Subject(Enum):
    """The object of a metric. The value is the row type in HAProxy's answer to `show stat`."""

    LISTENER = "0"
    POOL = "1"
    MEMBER = "2"


_BOTH = ("DOWN", "UP")
STATES = {Subject.LISTENER: _BOTH, Subject.POOL: _BOTH, Subject.MEMBER: (*_BOTH, "MAINT", "DRAIN", "NOLB")}
CODES = ("1xx", "2xx", "3xx", "4xx", "5xx", "other")
STATUS, RESPONSES = "status", "hrsp_"
_MILLISECONDS = frozenset(("qtime", "ctime", "rtime", "ttime", "qtime_max", "ctime_max", "rtime_max", "ttime_max"))
_OF_HTTP = frozenset(("req_rate_max", "req_tot", "intercepted", "cache_lookups", "cache_hits", RESPONSES))
_OF_HTTP |= frozenset(("comp_in", "comp_out", "comp_byp", "comp_rsp"))


class Family:
    """One metric and its key in `show info` or `show stat`. A dataclass would need a megabyte of memory."""

    __slots__ = ("column", "meaning", "name")

    def __init__(self, name: str, column: str, meaning: str) -> None:
        self.name = name
        self.column = column
        self.meaning = meaning

    @property
    def head(self) -> str:
        """The HELP and TYPE lines."""
        kind = "counter" if self.name.endswith("_total") else "gauge"
        return f"# HELP {self.name} {self.meaning}\n# TYPE {self.name} {kind}\n"

    @property
    def in_milliseconds(self) -> bool:
        """Whether HAProxy reports milliseconds; the metric is in seconds."""
        return self.column in _MILLISECONDS

    @property
    def of_http(self) -> bool:
        """Whether the metric exists only for objects in HTTP mode."""
        return self.column in _OF_HTTP


_MACHINE = (
    ("current_connections", "CurrConns", "Connections that are open"),
    ("max_connections", "Maxconn", "Connections that may be open at a time"),
    ("connections_total", "CumConns", "Connections accepted"),
    ("requests_total", "CumReq", "Requests received"),
    ("current_ssl_connections", "CurrSslConns", "TLS connections that are open"),
    ("max_ssl_connections", "MaxSslConns", "TLS connections that may be open at a time; 0: no limit"),
    ("ssl_connections_total", "CumSslConns", "TLS connections opened"),
    ("current_connection_rate", "ConnRate", "Connections accepted in the last second"),
    ("limit_connection_rate", "ConnRateLimit", "Connections that may be accepted in a second; 0: no limit"),
    ("max_connection_rate", "MaxConnRate", "Most connections ever accepted in a second"),
    ("current_session_rate", "SessRate", "Sessions begun in the last second"),
    ("limit_session_rate", "SessRateLimit", "Sessions that may begin in a second; 0: no limit"),
    ("max_session_rate", "MaxSessRate", "Most sessions ever begun in a second"),
    ("current_ssl_rate", "SslRate", "TLS sessions begun in the last second"),
    ("limit_ssl_rate", "SslRateLimit", "TLS sessions that may begin in a second; 0: no limit"),
    ("max_ssl_rate", "MaxSslRate", "Most TLS sessions ever begun in a second"),
    ("current_frontend_ssl_key_rate", "SslFrontendKeyRate", "TLS keys computed for clients in the last second"),
    ("max_frontend_ssl_key_rate", "SslFrontendMaxKeyRate", "Most TLS keys ever computed for clients in a second"),
    ("frontend_ssl_reuse", "SslFrontendSessionReuse_pct", "Percentage of clients' TLS sessions that were resumed"),
    ("current_backend_ssl_key_rate", "SslBackendKeyRate", "TLS keys computed for members in the last second"),
    ("max_backend_ssl_key_rate", "SslBackendMaxKeyRate", "Most TLS keys ever computed for members in a second"),
    ("ssl_cache_lookups_total", "SslCacheLookups", "TLS sessions looked for in the cache"),
    ("ssl_cache_misses_total", "SslCacheMisses", "TLS sessions not found in the cache"),
    ("http_comp_bytes_in_total", "CompressBpsIn", "Bytes per second going into compression"),
    ("http_comp_bytes_out_total", "CompressBpsOut", "Bytes per second coming out of compression"),
    ("limit_http_comp", "CompressBpsRateLim", "Bytes per second that compression may put out; 0: no limit"),
    ("listeners", "Listeners", "Sockets that accept connections"),
    ("dropped_logs_total", "DroppedLogs", "Log lines lost"),
)
_MEMORY = (
    ("allocated_bytes", "PoolAlloc_bytes", "Memory taken for HAProxy's pools"),
    ("used_bytes", "PoolUsed_bytes", "Memory in use in HAProxy's pools"),
    ("failures_total", "PoolFailed", "Failures to take memory for HAProxy's pools"),
)
# The letters say which objects have the metric: listeners (L), pools (P) and members (M).
_STATISTICS = (
    ("LPM", "status", STATUS, "State: 1 for the present one, 0 for the others"),
    ("LPM", "current_sessions", "scur", "Sessions that are open"),
    ("LPM", "max_sessions", "smax", "Most sessions ever open at a time"),
    ("LPM", "limit_sessions", "slim", "Sessions that may be open at a time"),
    ("LPM", "sessions_total", "stot", "Sessions begun"),
    ("L", "limit_session_rate", "rate_lim", "Sessions that may begin in a second; 0: no limit"),
    ("LPM", "max_session_rate", "rate_max", "Most sessions ever begun in a second"),
    ("L", "connections_rate_max", "conn_rate_max", "Most connections ever accepted in a second"),
    ("L", "connections_total", "conn_tot", "Connections accepted"),
    ("PM", "last_session_seconds", "lastsess", "Seconds since the last session was given; -1: none ever"),
    ("PM", "current_queue", "qcur", "Requests that wait for a place"),
    ("PM", "max_queue", "qmax", "Most requests that ever waited at a time"),
    ("M", "queue_limit", "qlimit", "Requests that may wait at a time"),
    ("PM", "connection_attempts_total", "connect", "Connections that were tried"),
    ("PM", "connection_reuses_total", "reuse", "Requests sent over a connection that was open already"),
    ("LPM", "bytes_in_total", "bin", "Bytes received from clients"),
    ("LPM", "bytes_out_total", "bout", "Bytes sent to clients"),
    ("PM", "queue_time_average_seconds", "qtime", "Time in the queue, mean of the last 1024 requests"),
    ("PM", "connect_time_average_seconds", "ctime", "Time to connect, mean of the last 1024 connections"),
    ("PM", "response_time_average_seconds", "rtime", "Time to the first byte, mean of the last 1024 requests"),
    ("PM", "total_time_average_seconds", "ttime", "Time in all, mean of the last 1024 requests"),
    ("PM", "max_queue_time_seconds", "qtime_max", "Longest time ever in the queue"),
    ("PM", "max_connect_time_seconds", "ctime_max", "Longest time it ever took to connect"),
    ("PM", "max_response_time_seconds", "rtime_max", "Longest time it ever took to the first byte"),
    ("PM", "max_total_time_seconds", "ttime_max", "Longest time a request ever took in all"),
    ("LP", "requests_denied_total", "dreq", "Requests that a rule denied"),
    ("LPM", "responses_denied_total", "dresp", "Responses that a rule denied"),
    ("L", "request_errors_total", "ereq", "Requests that could not be understood or never arrived"),
    ("L", "denied_connections_total", "dcon", "Connections that a rule denied"),
    ("L", "denied_sessions_total", "dses", "Sessions that a rule denied"),
    ("PM", "connection_errors_total", "econ", "Connections that failed"),
    ("PM", "response_errors_total", "eresp", "Responses that could not be used"),
    ("PM", "retry_warnings_total", "wretr", "Connections tried once more"),
    ("PM", "redispatch_warnings_total", "wredis", "Requests given to another member"),
    ("LPM", "failed_header_rewriting_total", "wrew", "Headers that could not be written"),
    ("PM", "client_aborts_total", "cli_abrt", "Transfers that the client broke off"),
    ("P", "member_aborts_total", "srv_abrt", "Transfers that the member broke off"),
    ("M", "server_aborts_total", "srv_abrt", "Transfers that the member broke off"),
    ("P", "active_members", "act", "Members that serve and are no backup"),
    ("P", "backup_members", "bck", "Backup members that could serve"),
    ("M", "weight", "weight", "Weight"),
    ("M", "check_failures_total", "chkfail", "Health checks that failed while the member was up"),
    ("PM", "check_up_down_total", "chkdown", "Times it went down"),
    ("PM", "check_last_change_seconds", "lastchg", "Seconds since it last went up or down"),
    ("PM", "downtime_seconds_total", "downtime", "Seconds it was down"),
    ("M", "current_throttle", "throttle", "Percentage of the weight in force after a slow start"),
    ("PM", "loadbalanced_total", "lbtot", "Times the algorithm has chosen it"),
    ("M", "idle_connections_current", "srv_icur", "Idle connections kept open"),
    ("M", "idle_connections_limit", "src_ilim", "Idle connections that may be kept open"),
    ("L", "http_requests_rate_max", "req_rate_max", "Most HTTP requests ever received in a second"),
    ("LP", "http_requests_total", "req_tot", "HTTP requests received"),
    ("LPM", "http_responses_total", RESPONSES, "HTTP responses by class of status"),
    ("L", "intercepted_requests_total", "intercepted", "HTTP requests answered by the load balancer itself"),
    ("LP", "http_cache_lookups_total", "cache_lookups", "HTTP objects looked for in the cache"),
    ("LP", "http_cache_hits_total", "cache_hits", "HTTP objects found in the cache"),
    ("LP", "http_comp_bytes_in_total", "comp_in", "Bytes of HTTP bodies given to compression"),
    ("LP", "http_comp_bytes_out_total", "comp_out", "Bytes of HTTP bodies that compression gave back"),
    ("LP", "http_comp_bytes_bypassed_total", "comp_byp", "Bytes of HTTP bodies that were not compressed"),
    ("LP", "http_comp_responses_total", "comp_rsp", "HTTP responses compressed"),
)

CPU = Family("octavia_loadbalancer_cpu", "", "Load of the last minute, as a percentage of the processors.")
MEMORY = Family("octavia_loadbalancer_memory", "", "Memory in use, as a percentage of the machine's.")
PROCESS = (
    *(Family(f"octavia_memory_pool_{name}", key, f"{meaning}.") for name, key, meaning in _MEMORY),
    *(Family(f"octavia_loadbalancer_{name}", key, f"{meaning}.") for name, key, meaning in _MACHINE),
)
STATISTICS = {
    subject: tuple(
        Family(f"octavia_{subject.name.lower()}_{name}", column, f"{meaning}, by {subject.name.lower()}.")
        for letters, name, column, meaning in _STATISTICS
        if subject.name[0] in letters
    )
    for subject in Subject
}
