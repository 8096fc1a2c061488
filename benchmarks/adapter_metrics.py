# SPDX-License-Identifier: Apache-2.0
"""Scrapes of metrics in the side-by-side benchmark: the agent's responder as a process of its own.

adapter_metrics.py PORT SOCKET-OF-HAPROXY
"""

import sys
import threading
import time
from pathlib import Path


class Metrics:
    """The harness's case `prometheus`.

    It puts HAProxy's exporter where our responder usually listens, for the incumbent translates that; we read the
    statistics socket, which the harness's HAProxy has as well.
    """

    def prom_command(self):
        return [sys.executable, str(Path(__file__).resolve()), "9102", f"{self.folder}/hap/h.sock"]


def main(port, place):
    from amphora_agent.haproxy.runtime_socket import Socket  # noqa: PLC0415 - the adapter has no use for them
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
