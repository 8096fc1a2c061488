# SPDX-License-Identifier: Apache-2.0
"""Prometheus' own tool accepts the alert rules, the scrape configuration, the dashboards' queries and our metrics.

`promtool` is in the package `prometheus` of Debian. AMPHORA_PROMTOOL names it outside of PATH, for example after
`apt-get download prometheus` and `dpkg-deb --extract`. Without it, the tests of this file are skipped.
"""

import json
import os
import shutil
import subprocess

import pytest
import yaml
from test_monitoring_files import DASHBOARDS, FOLDER, HAPROXY, panels
from test_process_metrics import full

from amphora_agent.responder.prometheus import exposition
from amphora_driver.metrics import ProcessMetrics
from amphora_driver.telemetry import fleet_metrics

PROMTOOL = os.environ.get("AMPHORA_PROMTOOL") or shutil.which("promtool")
RULES = FOLDER / "prometheus/alerts.yaml"
pytestmark = [pytest.mark.extended, pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")]


def promtool(*words, text=None):
    done = subprocess.run([PROMTOOL, *map(str, words)], input=text, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def all_rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_the_rules_and_the_scrape_configuration_are_valid():
    assert f"{len(all_rules())} rules found" in promtool("check", "rules", RULES)
    promtool("check", "config", "--syntax-only", FOLDER / "prometheus/scrape.yaml")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda one: one.stem)
def test_the_queries_of_a_dashboard_are_valid(path, tmp_path):
    """The queries become rules, because the tool reads queries in rules only."""
    queries = [
        target["expr"].replace("$__rate_interval", "5m") for panel in panels(path)[1] for target in panel["targets"]
    ]
    rules = [{"record": f"dashboard:query_{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": path.stem, "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", file)


def test_the_metrics_of_all_processes_have_the_format_of_prometheus():
    text, _ = fleet_metrics.encode_metrics("", ProcessMetrics().registry, full(), "1", "controller")
    promtool("check", "metrics", text=text.decode())
    promtool("check", "metrics", text="".join(exposition(HAPROXY, load=1.0, memory=1.0)))


def series(name, values, **labels):
    inside = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


@pytest.mark.parametrize(
    ("alert", "inputs", "fires"),
    [
        ("AmphoraScrapeFailed", [series("up", "0x20", job="amphora-fleet", instance="ctl1:9878")], True),
        ("AmphoraScrapeFailed", [series("up", "0x20", job="node", instance="ctl1:9100")], False),
        ("AmphoraStatusUnreadable", [], True),
        ("AmphoraStatusUnreadable", [series("amphora_fleet_up", "1x20", instance="ctl1:9878")], False),
        # One of two processes still reads the state of the fleet.
        (
            "AmphoraStatusUnreadable",
            [series("amphora_fleet_up", f"{up}x20", instance=f"ctl{up}:9878") for up in (0, 1)],
            False,
        ),
        (
            "AmphoraLoadBalancerInError",
            [series("amphora_fleet_load_balancers", "2x20", status="ERROR", instance=f"ctl{one}") for one in (1, 2)],
            True,
        ),
        ("AmphoraLoadBalancerInError", [series("amphora_fleet_load_balancers", "2x20", status="ACTIVE")], False),
    ],
)
def test_an_alert_fires_exactly_in_its_situation(alert, inputs, fires, tmp_path):
    (rule,) = (one for one in all_rules() if one["alert"] == alert)
    case = tmp_path / "case.yaml"
    expected = [{"exp_labels": _labels(rule, inputs)}] if fires else []
    # The tool compares annotations too, which other tests check.
    bare = {name: value for name, value in rule.items() if name != "annotations"}
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "bare", "rules": [bare]}]}))
    test = {"interval": "1m", "input_series": inputs}
    test["alert_rule_test"] = [{"eval_time": "15m", "alertname": alert, "exp_alerts": expected}]
    case.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", case)


def _labels(rule, inputs):
    """Return the labels of the alert: those of the rule, and those of the series that the expression keeps."""
    found = dict(rule["labels"])
    for one in inputs[:1]:
        pairs = dict(pair.split("=") for pair in one["series"].partition("{")[2].rstrip("}").split(", ") if pair)
        found |= {name: value.strip('"') for name, value in pairs.items()}
    if "without (instance)" in rule["expr"]:
        found.pop("instance", None)
    return found
