# SPDX-License-Identifier: Apache-2.0
"""The agent accepts the output of Octavia 19's template and refuses injected directives.

The test starts Octavia once, as a program, which renders every case and sends no request.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pki
import pytest
from balancers import LB, balancer, listener, pool
from octavia_process import interpreter
from template_cases import M1, cases, policy, rule, terminated

from amphora_agent.apply.bundle_check import refuse_directives
from amphora_agent.errors import AgentError, ConfigurationRefused
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.octavia_api_v1 import uploads
from amphora_agent.octavia_api_v1.haproxy_cfg import translate

HERE = Path(__file__).parent
MARK = "xinjectedx"
MONITOR = {"type": "HTTP", "http_method": "GET", "expected_codes": "200", "url_path": "/"}
# Octavia did not refuse line breaks in these fields: the first ones until 2022, the last ones until 2026.
INJECTED = {
    "url_path": balancer(listener(), pool(M1, monitor={**MONITOR, "url_path": f"/{MARK}"})),
    "cookie_name": balancer(listener(), pool(M1, persistence={"type": "APP_COOKIE", "cookie_name": MARK})),
    "l7rule key": balancer(listener(policies=[policy(rule("HEADER", key=MARK))]), pool(M1)),
    "l7rule value": balancer(listener(policies=[policy(rule("PATH", value=f"/{MARK}"))]), pool(M1)),
    "tls_ciphers": balancer(terminated(tls_ciphers=MARK), pool(M1)),
    "pool tls_ciphers": balancer(listener(), pool(M1, tls_enabled=True, tls_ciphers=MARK)),
    "redirect_url": balancer(
        listener(policies=[policy(rule("PATH"), action="REDIRECT_TO_URL", redirect_url=f"http://x/{MARK}")]), pool(M1)
    ),
    "redirect_prefix": balancer(
        listener(policies=[policy(rule("PATH"), action="REDIRECT_PREFIX", redirect_prefix=f"http://x/{MARK}")]),
        pool(M1),
    ),
}
# Text that ends the line of the value so that HAProxy accepts it; the rest becomes a comment.
CLOSING = {"cookie_name": "x)", "l7rule key": "x) -m found"}
PAYLOADS = {
    "http-request return": "\n    http-request return status 200 content-type text/plain file /etc/passwd",
    "http-request deny": "\n    http-request deny if { src -f /etc/shadow }",
    "acl": "\n    acl a path,map(/etc/shadow) -m found",
    "errorfile": "\n    errorfile 503 /etc/amphora-agent/server.pem",
    "external-check": "\r\n    external-check command /bin/sh",
    "filter": "\n\tfilter spoe engine x config /etc/passwd",
    "http-request lua.x": "\n    http-request lua.x",
    "log": "\n    log 192.0.2.1:514 local0",
    "stats": "\n    stats socket /tmp/x level admin",
    "the address of 'server'": "\n    server x unix@/run/x.sock",
    "the address of 'bind'": "\n    bind abns@x",
    "a 'listen' section": "\nlisten x\n    bind :1",
    "a 'program' section": "\n  program x\n    command /bin/sh",
}


@pytest.fixture(scope="module")
def rendered():
    """Text and files of every case and of every injected field, by name."""
    authority = pki.Authority("tenant")
    issued = {name: authority.issue(name) for name in ("one.test", "two.test")}
    secrets = {name: {"certificate": each.certificate_pem, "key": each.key_pem} for name, each in issued.items()}
    wanted = {**cases(), **{f"injected {field}": each for field, each in INJECTED.items()}}
    request = {
        "secrets": {**secrets, "ca": authority.pem, "crl": authority.revoke()},
        "balancers": list(wanted.values()),
    }
    program = [interpreter(), str(HERE / "octavia_template.py")]
    run = subprocess.run(program, input=json.dumps(request), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(zip(wanted, json.loads(run.stdout), strict=True))


def judge(text, files):
    """Return the agent's translation of an upload, or raise its refusal."""
    found = translate(text, LB)
    refuse_directives(parse(found.text), uploads.collect(found.files, files.get, LB))
    return found


@pytest.mark.parametrize("name", cases())
def test_octavias_rendered_template_is_accepted(rendered, name):
    case = rendered[name]
    assert judge(case["text"], case["files"]).ports or name == "disabled"


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("field", INJECTED)
def test_an_injected_directive_is_refused(rendered, field, payload):
    case = rendered[f"injected {field}"]
    judge(case["text"], case["files"])
    assert MARK in case["text"]
    with pytest.raises(AgentError) as refused:
        judge(case["text"].replace(MARK, f"{CLOSING.get(field, 'x')}{PAYLOADS[payload]}\n    # "), case["files"])
    assert isinstance(refused.value, ConfigurationRefused)
    assert payload in str(refused.value)
