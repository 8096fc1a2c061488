# SPDX-License-Identifier: Apache-2.0
"""The columns of HAProxy's statistics that are summed over its workers.

Invariant: HAProxy only increases them (management guide, 9.1, "CSV format"). The counters of health checks are not
included: they describe members, not traffic, and each worker counts the same checks.
"""

from __future__ import annotations

_TRAFFIC = ("stot", "bin", "bout")
_ERRORS = ("ereq", "dreq", "dresp", "econ", "eresp", "wretr", "wredis", "wrew", "cli_abrt", "srv_abrt")
_SESSIONS = ("lbtot", "connect", "reuse", "conn_tot", "dcon", "dses", "req_tot", "intercepted")
_RESPONSES = ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other")
_CONTENT = ("cache_lookups", "cache_hits", "comp_in", "comp_out", "comp_byp", "comp_rsp")
COUNTED = (*_TRAFFIC, *_ERRORS, *_SESSIONS, *_RESPONSES, *_CONTENT)
