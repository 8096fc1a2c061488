# SPDX-License-Identifier: Apache-2.0
"""Serve one OpenStack API with waitress.

Usage: serve_wsgi.py PORT THREADS MODULE, in .sandbox/openstack-venv.
"""

import importlib
import sys

import waitress

_, port, threads, module = sys.argv
# The applications parse the arguments of the process.
sys.argv = [module]
waitress.serve(
    importlib.import_module(module).application,
    listen=f"127.0.0.1:{port}",
    threads=int(threads),
    clear_untrusted_proxy_headers=True,
)
