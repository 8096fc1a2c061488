# SPDX-License-Identifier: Apache-2.0
"""Serve one OpenStack API with waitress: serve_wsgi.py PORT THREADS MODULE|PASTE-FILE [ARGUMENT…].

Runs in the environment of the services. The application gets the arguments as those of its process. Standard output has
one line for each request (`request_log.py` reads it): the user, the method and the path.
"""

import importlib
import os
import sys

import waitress
from paste import deploy

_, port, threads, source, *arguments = sys.argv
# The applications parse the arguments of the process.
sys.argv = [source, *arguments]
application = deploy.loadapp(f"config:{source}") if "/" in source else importlib.import_module(source).application


def logged(environ, start_response):
    """Call the application, then write the line of the request."""
    line = f"{environ['REQUEST_METHOD']} {environ['SCRIPT_NAME']}{environ['PATH_INFO']}"
    try:
        return application(environ, start_response)
    finally:
        # keystonemiddleware has set both variables. With the second one, a service acts for the user of the first one.
        user = environ.get("HTTP_X_SERVICE_USER_NAME") or environ.get("HTTP_X_USER_NAME") or "-"
        # One system call, so that lines of several threads are never mixed.
        os.write(1, f"request {user} {line}\n".encode())


waitress.serve(
    logged,
    listen=f"127.0.0.1:{port}",
    threads=int(threads),
    clear_untrusted_proxy_headers=True,
)
