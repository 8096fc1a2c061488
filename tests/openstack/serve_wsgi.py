# SPDX-License-Identifier: Apache-2.0
"""Serve one OpenStack API with waitress: serve_wsgi.py PORT THREADS MODULE|PASTE-FILE [ARGUMENT…].

Runs in the environment of the services. The application gets the arguments as those of its process.
"""

import importlib
import sys

import waitress
from paste import deploy

_, port, threads, source, *arguments = sys.argv
# The applications parse the arguments of the process.
sys.argv = [source, *arguments]
application = deploy.loadapp(f"config:{source}") if "/" in source else importlib.import_module(source).application
waitress.serve(
    application,
    listen=f"127.0.0.1:{port}",
    threads=int(threads),
    clear_untrusted_proxy_headers=True,
)
