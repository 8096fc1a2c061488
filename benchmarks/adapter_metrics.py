# SPDX-License-Identifier: Apache-2.0
"""Metrics scrapes in the side-by-side benchmark: the agent's responder as a separate process.

adapter_metrics.py PORT HAPROXY-SOCKET
"""

import sys
import threading
import time
from pathlib import Path


class Metrics:
    """The case `prometheus` of the harness.

    The incumbent converts the output of HAProxy's exporter, which the harness puts on the responder's usual port. This
    responder reads the statistics socket of the same HAProxy.
    """

    def prom_command(self):
        return [sys.executable, str(Path(__file__).resolve()), "9102", f"{self.folder}/hap/h.sock"]


def main(port, place):
    from amphora_agent.haproxy.runtime_socket import Socket  # noqa: PLC0415 - the adapter itself does not need them
    from amphora_agent.network.namespace import Namespace  # noqa: PLC0415
    from amphora_agent.paths import Paths  # noqa: PLC0415
    from amphora_agent.responder import prometheus  # noqa: PLC0415
    from amphora_agent.responder.http_server import Responder  # noqa: PLC0415

    namespace = Paths().inner_namespace
    while not namespace.exists():
        time.sleep(0.01)
    worker = Socket(Path(place))
    Responder(Namespace(namespace).run, port, lambda: prometheus.scrape(worker), dict).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
