# SPDX-License-Identifier: Apache-2.0
"""A remote shell in a test guest: runs commands as root.

Only the disks that tests make of an image's tree contain it, never an image. It uses the standard library only, because
the guest has no other modules.

    one connection: a line {"argv": [...], "seconds": 60}, answered with a line {"code": 0, "said": "..."}
"""

import json
import socketserver
import subprocess

PORT = 9400


class _Shell(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        try:
            ended = subprocess.run(
                asked["argv"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=asked["seconds"],
                check=False,
            )
            answer = {"code": ended.returncode, "said": ended.stdout.decode(errors="replace")}
        except (OSError, subprocess.SubprocessError) as error:
            answer = {"code": -1000, "said": str(error)}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    with _Server(("", PORT), _Shell) as server:
        server.serve_forever()
