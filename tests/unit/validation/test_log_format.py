# SPDX-License-Identifier: Apache-2.0
"""Log formats: HAProxy accepts each accepted format; refused formats fail in HAProxy or give a wrong line."""

import subprocess

import pytest

from amphora_driver.errors import UnsupportedOption
from amphora_driver.render.effective_defaults import LOG_FORMAT
from amphora_driver.validation import log_format

GOOD = [
    " ".join(f"%{name}" for name in sorted(log_format.VARIABLES)),
    "%ci:%cp [%tr] %f %b/%s %ST %B",
    "%{+Q}r",
    "%{+Q,-X}o %{-Q}ci_%cp",
    "100%%",
    "%[ssl_c_verify] %{+Q}[ssl_c_s_dn]",
    "%[src] %[src,ipmask(24)]",
    LOG_FORMAT,
    "no variable; one \\ and one 'quote' ~ ü",
]
REFUSED = [
    "%nosuch",
    "%cix",
    "50%",
    "% x",
    "%{+Q",
    "%{+Q}",
    "%{+Q}%ci",
    "%[src",
    "%[]",
    "%{+W}r",
    "%[path,map(/etc/passwd)]",
    "%[env(HOME)]",
]


def haproxy(tmp_path, text):
    quoted = "".join(f"\\{one}" if one in "\"\\$'# " else one for one in text)
    path = tmp_path / "haproxy.cfg"
    head = "frontend one\n mode http\n bind 127.0.0.1:8080\n timeout client 1s\n log 127.0.0.1:514 local0\n"
    path.write_text(f"{head} log-format {quoted}\n")
    return subprocess.run(["haproxy", "-c", "-f", path], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("text", GOOD)
def test_accepted_formats_are_accepted_by_haproxy(tmp_path, text):
    log_format.check_log_format(text)
    found = haproxy(tmp_path, text)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("%f %ci", False),
        ("{{ project_id }} {{lb_id}} %f", False),
        ("{{lb_id}} %f %r", False),
        ("%ci %f", True),
        ("%fc", True),
        ("%ft %ci", True),
        ("%f,%ci", True),
        ("{{lb_id}}", True),
        ("%{+Q}o %f", True),
        ("x %f", True),
    ],
)
def test_the_listener_precedes_all_values_of_clients(text, added):
    assert log_format.with_listener(text) == (f"%f {text}" if added else text)


@pytest.mark.parametrize("text", REFUSED)
def test_refused_formats_are_named(text):
    with pytest.raises(UnsupportedOption, match="log_format"):
        log_format.check_log_format(text)


@pytest.mark.parametrize("text", REFUSED[:8])
def test_refused_formats_break_the_haproxy_configuration(tmp_path, text):
    found = haproxy(tmp_path, text)
    assert found.returncode == 1
    assert "log-format" in found.stderr
