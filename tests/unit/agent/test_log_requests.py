# SPDX-License-Identifier: Apache-2.0
"""HTTPS requests of the log forwarder to a server that closes its connections."""

import socket
import ssl
import threading

import pytest
from dataplane.pki import Authority

from amphora_agent.log_forwarder.transports import Requests
from amphora_agent.log_settings import parse_endpoint

HOST = "127.0.0.1"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.fixture
def contexts(tmp_path):
    """The TLS contexts of server and client; the server sends no TLS tickets."""
    authority = Authority("log targets")
    (tmp_path / "server.pem").write_text(authority.issue("target", HOST).pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.pem")
    server.num_tickets = 0
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=authority.pem)
    return server, client


def test_no_line_is_sent_on_a_second_connection_before_the_target_accepts_it(contexts):
    received = []
    with socket.create_server((HOST, 0)) as listening:
        listening.settimeout(10)

        def accept():
            accepted, _ = listening.accept()
            accepted.settimeout(10)
            return contexts[0].wrap_socket(accepted, server_side=True)

        def serve():
            with accept() as first:
                while not b"".join(received).endswith(b"line\n"):
                    received.append(first.recv(4096))
                first.sendall(ANSWER)
            accept().close()

        serving = threading.Thread(target=serve)
        serving.start()
        made = Requests(parse_endpoint(f"https://{HOST}:{listening.getsockname()[1]}/"), contexts[1], "")
        made.send([b"line\n"])
        with pytest.raises(ConnectionResetError, match="closed the connection after the TLS handshake"):
            made.send([b"line\n"])
        serving.join()
    assert not made.is_connected
