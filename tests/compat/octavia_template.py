# SPDX-License-Identifier: Apache-2.0
"""A program that renders load balancers with Octavia's own template, without an amphora.

Octavia's code does the whole update, certificates included; only the amphora's answers are replaced. One request on
standard input, one answer on standard output, both JSON.

    python octavia_template.py < {"secrets": {...}, "balancers": [...]}
"""

import json
import sys

from octavia_worker import Worker, dm

DETAILS = {
    "active_tuned_profiles": "virtual-guest amphora",
    "cpu_count": 4,
    "memory": {"free": 10_000_000, "buffers": 0, "cached": 0},
}


class Amphora:
    """A client of the agent that only records its arguments."""

    def __init__(self):
        self.texts, self.files = [], {}

    def get_details(self, *_, **__):
        return DETAILS

    def get_cert_md5sum(self, *_, **__):
        return ""

    def upload_cert_pem(self, _amphora, _load_balancer, name, pem, **_):
        self.files[name] = pem.decode() if isinstance(pem, bytes) else pem

    def upload_config(self, _amphora, _load_balancer, text, **_):
        self.texts.append(text)

    def reload_listener(self, *_, **__):
        pass


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    request = json.loads(sys.stdin.read())
    worker = Worker({}, request["secrets"])
    worker.amphora = dm.Amphora(id="a0000000-0000-4000-8000-000000000001", vrrp_ip="198.51.100.10", status="ALLOCATED")
    worker.amphora.api_version = "1.0"
    driver, found = worker.driver, []
    driver._get_haproxy_versions = lambda *_, **__: ["2", "6", "12"]
    driver._populate_amphora_api_version = lambda *_, **__: None
    for wanted in map(dict, request["balancers"]):
        driver.jinja_combo.connection_logging = wanted.pop("connection_logging", True)
        amphora = Amphora()
        driver.clients = {"1.0": amphora}
        driver.update_amphora_listeners(worker.load_balancer(wanted), worker.amphora)
        found.append({"text": amphora.texts[0], "files": amphora.files})
    json.dump(found, answers)


if __name__ == "__main__":
    main()
