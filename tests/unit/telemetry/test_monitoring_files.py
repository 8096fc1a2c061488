# SPDX-License-Identifier: Apache-2.0
"""The dashboards, alert rules and scrape configuration use only names and labels that the code defines."""

import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import sqlalchemy as sa
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_process_metrics import full

from amphora_agent.responder.prometheus import exposition
from amphora_cluster.controller import status_page as cluster_page
from amphora_cluster.database import tables as cluster_tables
from amphora_cluster.metrics import ClusterMetrics
from amphora_driver.config.status import OPTIONS
from amphora_driver.metrics import ProcessMetrics
from amphora_driver.telemetry import fleet_metrics, handlers

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "monitoring"
DASHBOARDS = sorted((FOLDER / "grafana").glob("*.json"))
PAGE = ROOT / "docs/how-to/monitor.md"
SEVERITIES = {"critical", "warning", "info"}
# Words of PromQL that are no names of metrics or labels.
WORDS = {"and", "or", "unless", "bool", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "inf"}
HAPROXY = (
    "CurrConns: 1\n\n# pxname,svname,status,mode,type,\n"
    "l,FRONTEND,OPEN,http,0,\np,BACKEND,UP,http,1,\np,m,UP,http,2,\n\n"
)
SELECTOR = re.compile(r"(?<![\w:])([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')


def process_families():
    meters = ProcessMetrics()
    meters.set_heartbeat_source(lambda: (1, {"magic": 1}))
    with pytest.raises(RuntimeError), meters.step("Push"):
        raise RuntimeError
    text, _ = fleet_metrics.encode_metrics("", meters.registry, full(), "1", "controller")
    return text_string_to_metric_families(text.decode())


def cluster_families():
    engine = sa.create_engine("sqlite://")
    cluster_tables.metadata.create_all(engine)
    with engine.connect() as connection:
        gauges = cluster_page._read_metrics(connection)
    engine.dispose()
    return [*ClusterMetrics().registry.collect(), *gauges]


def amphora_families():
    text = "".join(exposition(HAPROXY, load=1.0, memory=1.0))
    return text_string_to_metric_families(text)


@cache
def defined():
    """Return the label values by metric name and label name."""
    found = defaultdict(lambda: defaultdict(set))
    for family in (*process_families(), *cluster_families(), *amphora_families()):
        for sample in family.samples:
            labels = found[sample.name]
            for name, value in sample.labels.items():
                labels[name].add(value)
    found["up"] = defaultdict(set)  # a metric of Prometheus itself
    return found


@cache
def scrape_jobs():
    return yaml.safe_load((FOLDER / "prometheus/scrape.yaml").read_text(encoding="utf-8"))["scrape_configs"]


def target_labels():
    """Return the labels that Prometheus adds to a target, with the values of the jobs."""
    found = {"job": {one["job_name"] for one in scrape_jobs()}, "instance": set()}
    for job in scrape_jobs():
        for group in job["static_configs"]:
            for name in group.get("labels", {}):
                found.setdefault(name, set())
    return found


def problems(expression):
    """Return the names in a PromQL expression that do not exist, and the labels of its metrics."""
    found, labels = [], {*target_labels(), "le"}
    metrics = defined()
    rest = re.sub(r"\[[^\]]*\]", "", expression)
    for name, matchers in SELECTOR.findall(rest):
        known = metrics.get(name, {})
        if MATCHER.sub("", matchers):
            found.append(f"matchers {matchers} of {name}")
        for label, operator, value in MATCHER.findall(matchers):
            if label not in known and label not in target_labels():
                found.append(f"label {label} of {name}")
            values = known.get(label) or target_labels().get(label)
            found += [
                f"value {one} of {name} {label}"
                for one in expand(value)
                if operator in {"=", "=~"} and values and "$" not in one and one not in values
            ]
    rest = SELECTOR.sub(r"\1", rest)
    grouped = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", rest)
    rest = re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", "", rest)
    for name in re.findall(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", rest):
        if name in WORDS:
            continue
        if name not in metrics:
            found.append(f"metric {name}")
        labels |= set(metrics.get(name, {}))
    for name in filter(None, (one.strip() for group in grouped for one in group.split(","))):
        if name not in labels:
            found.append(f"label {name}")
    return found, labels


def expand(value):
    """Return the alternatives of a regular expression such as `a-(b|c)` or `a|b`."""
    if grouped := re.fullmatch(r"([^()]*)\(([^()]*)\)([^()]*)", value):
        return [grouped[1] + one + grouped[3] for one in grouped[2].split("|")]
    return value.split("|")


def rules():
    document = yaml.safe_load((FOLDER / "prometheus/alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def panels(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    return document, [one for one in document["panels"] if one["type"] != "row"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("max(amphora_fleet_up) < 1 or absent(amphora_fleet_up)", []),
        ('sum by (how) (rate(amphora_pushes_total{how=~"reload|start"}[$__rate_interval]))', []),
        ("sum(rate(amphora_step_seconds_bucket[5m]))", []),
        ("amphora_pushed_total", ["metric amphora_pushed_total"]),
        ("sum by (cause) (amphora_pushes_total)", ["label cause"]),
        ('amphora_pushes_total{cause="x"}', ["label cause of amphora_pushes_total"]),
        ('amphora_pushes_total{how=~"reload|restart"}', ["value restart of amphora_pushes_total how"]),
        ('octavia_member_status{state="GONE"}', ["value GONE of octavia_member_status state"]),
        ('up{job=~"amphora-(fleet|other)"}', ["value amphora-other of up job"]),
        ("amphora_pushes_total{how=reload}", ["matchers how=reload of amphora_pushes_total"]),
    ],
)
def test_the_check_finds_names_that_do_not_exist(expression, expected):
    assert problems(expression)[0] == expected


@pytest.mark.parametrize("rule", rules(), ids=lambda one: one["alert"])
def test_an_alert_rule_is_complete_and_uses_defined_names(rule):
    wrong, labels = problems(rule["expr"])
    assert wrong == []
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert all(notes.values())
    assert rule["labels"]["severity"] in SEVERITIES
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(notes.values())))
    assert used <= labels
    for aggregation in re.findall(r"^(?:sum|max|min)(?: by \(([^)]*)\))? ?\(", rule["expr"]):
        # An aggregation keeps only its labels, so no other label is in the annotations.
        assert used <= {one.strip() for one in aggregation.split(",")}
    path, _, anchor = notes["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / path)


def test_every_section_of_the_page_is_an_alert():
    names = [one["alert"] for one in rules()]
    assert len(set(names)) == len(names)
    assert re.findall(r"^### (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == names


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda one: one.stem)
def test_a_dashboard_uses_defined_names(path):
    document, shown = panels(path)
    assert len({one["id"] for one in document["panels"]}) == len(document["panels"])
    assert shown
    for panel in shown:
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        for target in panel["targets"]:
            wrong, labels = problems(target["expr"])
            assert wrong == [], panel["title"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            assert metric in defined()
            assert label in {*defined()[metric], *target_labels()}


def test_panels_of_a_dashboard_do_not_overlap():
    for path in DASHBOARDS:
        cells = set()
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            at = panel["gridPos"]
            area = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & area, (path.name, panel["title"])
            cells |= area


def test_the_scrape_configuration_has_the_default_ports_and_served_paths():
    ports = {one.name: one.default for one in OPTIONS["amp_status_page"] if one.name.endswith("bind_port")}
    jobs = {one["job_name"]: one for one in scrape_jobs()}
    text = Path(handlers.__file__).read_text(encoding="utf-8")
    for name in ("amphora-process", "amphora-fleet"):
        assert f'"{jobs[name]["metrics_path"]}"' in text
    targets = [target for group in jobs["amphora-process"]["static_configs"] for target in group["targets"]]
    assert {int(one.rpartition(":")[2]) for one in targets} == set(ports.values())


def test_the_process_job_adds_no_labels():
    (job,) = [one for one in scrape_jobs() if one["job_name"] == "amphora-process"]
    assert not any("labels" in group for group in job["static_configs"]), "fail-overs would be counted several times"
