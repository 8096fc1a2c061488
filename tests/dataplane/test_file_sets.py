# SPDX-License-Identifier: Apache-2.0
"""The files beside HAProxy's configuration: certificates with keys, authorities, revocation lists."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pki
import pytest
from amphora_lab import VIP, Amphora, Client, alive, descendants, eventually
from configuration_text import LISTENER, MEMBER_IDS, MEMBERS, POOL, listener, text

pytestmark = pytest.mark.root

PEM, LIST = f"tls/{LISTENER}/default.pem", f"tls/{LISTENER}/certificates.list"
CLIENT_PEM, CA = f"tls/{POOL}/client.pem", f"tls/{POOL}/ca.pem"


def secure(members=("m1",), extra: str = "", **keywords: str) -> str:
    """A listener on port 80 without TLS and on port 443 with it."""
    bind = f"    bind {VIP}:443 ssl crt-list {LIST}\n"
    return text(listener(members, extra=extra, **keywords).replace("    default_backend", f"{bind}    default_backend"))


def files(certificate: pki.Certificate) -> dict[str, str]:
    return {PEM: certificate.pem, LIST: f"{PEM}\n"}


def presented(amphora) -> bytes:
    """Return the certificate that a client gets."""

    def handshake():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((VIP, 443), 5) as plain, context.wrap_socket(plain) as secured:
            secured.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert secured.recv(100).startswith(b"HTTP/1.1 200")
            return secured.getpeercert(binary_form=True)

    return amphora.network.thread("cl").run(handshake)


def run_directory(amphora) -> Path:
    return Path(f"/proc/{amphora.init()}/root/run/amphora-agent")


def sets(amphora) -> list[dict[str, str]]:
    """Return the sets of files in the amphora's memory: each file's content by its name."""
    root = run_directory(amphora) / "files"
    while True:
        found = sorted(root.iterdir()) if root.exists() else []
        # The agent may delete a set while this function reads it.
        with suppress(FileNotFoundError):
            return [{str(f.relative_to(d)): f.read_text() for f in d.rglob("*") if f.is_file()} for d in found]


def test_a_listener_is_served_with_its_files_and_a_certificate_is_replaced(amphora, tenant):
    old, new = tenant.issue("www.example.com"), tenant.issue("www.example.com", number=1)
    status, answer = amphora.push(1, secure(), files(old))
    assert (status, answer.get("how")) == (200, "start"), answer
    assert presented(amphora) == old.der
    assert amphora.push(1, secure(), files(old))[1]["how"] == "unchanged"
    (served,) = sets(amphora)
    assert served == files(old)
    unchanged = (run_directory(amphora) / "files").glob("*/" + LIST)
    inode = next(unchanged).stat().st_ino
    with Client(amphora.network) as client:
        status, answer = amphora.push(2, secure(), files(new))
        assert (status, answer.get("how")) == (200, "runtime"), answer
        assert answer["reason"] == f"file {PEM} of listener {LISTENER} has another content"
        assert presented(amphora) == new.der
        # A change of members needs no reload with files, either.
        assert amphora.push(3, secure(["m1", "m2"]), files(new))[1]["how"] == "runtime"
        client.hears("m2")
    assert client.failures == []
    assert sets(amphora) == [files(new)]
    for place in (run_directory(amphora) / "files").rglob("*"):
        expected = 0o100600 if place.is_file() else 0o40700
        assert (place.stat().st_mode, place.stat().st_uid) == (expected, 0)
    # The agent does not rewrite an unchanged file.
    assert next((run_directory(amphora) / "files").glob("*/" + LIST)).stat().st_ino == inode
    status, answer = amphora.push(4, text(listener(["m1", "m2"])))
    assert (status, answer.get("how")) == (200, "reload"), answer
    assert sets(amphora) == []


def test_the_same_generation_with_another_file_is_refused(amphora, tenant):
    old, new = tenant.issue("www.example.com"), tenant.issue("www.example.com", number=1)
    assert amphora.push(1, secure(), files(old))[0] == 200
    status, answer = amphora.push(1, secure(), files(new))
    assert (status, answer["generation"]) == (409, 1)
    assert presented(amphora) == old.der


def test_a_broken_file_is_refused_and_the_old_one_serves(amphora, tenant):
    good, other = tenant.issue("www.example.com"), tenant.issue("www.example.com", number=1)
    before = files(good)
    amphora.push(1, secure(), before)
    secured = server_with_tls("m1")
    pool_files = {CLIENT_PEM: other.pem, CA: tenant.pem}
    broken = [
        (LISTENER, secure(), {**before, PEM: "no certificate\n"}),
        (LISTENER, secure(), {**before, PEM: good.certificate_pem}),
        (LISTENER, secure(), {**before, PEM: good.certificate_pem + other.key_pem}),
        (LISTENER, secure(), {**before, LIST: f"tls/{LISTENER}/missing.pem\n"}),
        (LISTENER, secure(), {**before, LIST: f"{PEM} [nonsense x]\n"}),
        (LISTENER, secure(), {PEM: before[PEM]}),
        (POOL, secure(m1=secured), {**before, **pool_files, CLIENT_PEM: other.certificate_pem}),
        (POOL, secure(m1=secured), {**before, **pool_files, CA: "nothing\n"}),
        (MEMBER_IDS["m1"], secure(m1=secured), {**before, CA: tenant.pem}),
    ]
    with Client(amphora.network) as client:
        for object_id, wrong, content in broken:
            status, answer = amphora.push(2, wrong, content)
            assert (status, answer["object_id"]) == (422, object_id), (answer, object_id)
            assert "amphora-agent" not in json.dumps(answer)
            assert presented(amphora) == good.der
            assert sets(amphora) == [before]
        client.hears("m1")
    assert client.failures == []
    status, answer = amphora.push(2, secure(m1=secured), {**before, **pool_files})
    assert (status, answer.get("how")) == (200, "reload"), answer


def server_with_tls(name: str) -> str:
    return f"weight 1 check inter 60s ssl verify required ca-file {CA} crt {CLIENT_PEM} sni str({name}.example)"


def test_members_with_files_are_added_at_runtime(amphora, tenant):
    """HAProxy loads their files before it adds them."""
    pair = tenant.issue("client")
    content = {**files(pair), CLIENT_PEM: pair.pem, CA: tenant.pem}
    status, answer = amphora.push(1, secure(["m1"], m1="weight 1"), files(pair))
    assert status == 200, answer
    for generation, members in enumerate((["m1", "m2"], list(MEMBERS), ["m1"], ["m1", "m3"]), start=2):
        secured = secure(members, m1="weight 1", m2=server_with_tls("m2"), m3=server_with_tls("m3"))
        status, answer = amphora.push(generation, secured, content if len(members) > 1 else files(pair))
        assert (status, answer.get("how")) == (200, "runtime"), answer


def test_the_amphora_serves_after_a_restart_of_the_agent(amphora, tenant):
    certificate = tenant.issue("www.example.com")
    amphora.push(7, secure(), files(certificate))
    haproxy = amphora.status("haproxy")["pid"]
    with Client(amphora.network) as client:
        kill_agent(amphora)
        assert amphora.call("GET", "/v2/bundle")[1]["generation"] == 7
        assert amphora.push(7, secure(), files(certificate))[1]["how"] == "unchanged"
        assert presented(amphora) == certificate.der
        client.hears("m1")
    assert client.failures == []
    assert amphora.status("haproxy")["pid"] == haproxy
    os.kill(amphora.outside_pid(haproxy), signal.SIGKILL)
    eventually(lambda: amphora.status("haproxy")["pid"] not in (None, haproxy), "HAProxy is started again")
    eventually(lambda: shown(amphora) == certificate.der, "the listener serves again")


def shown(amphora) -> bytes | None:
    try:
        return presented(amphora)
    except OSError:
        return None


def kill_agent(amphora) -> None:
    agent = amphora.agent_pid()
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: not alive(agent), "the agent has ended")
    eventually(amphora.answers, "the agent answers")


def test_a_rebooted_agent_without_keys_reports_the_lost_generation(amphora, receiver, network, tenant):
    certificate = tenant.issue("www.example.com")
    assert amphora.push(7, secure(), files(certificate))[0] == 200
    confirmed = (amphora.var / "confirmed.json").read_text()
    assert "BEGIN" not in confirmed
    assert hashlib.sha256(certificate.pem.encode()).hexdigest() in confirmed
    eventually(lambda: receiver.next().document["generation"] == 7, "a heartbeat reports generation 7")
    epoch = receiver.next().epoch
    amphora.power_off()
    network.unplug()
    network.plug()
    amphora.start()
    eventually(amphora.answers, "the agent answers")
    nothing = {"generation": 0, "applied_at": None, "digest": None, "lost_generation": 7}
    nothing["settings_digest"] = amphora.call("GET", "/v2/settings")[1]["digest"]
    nothing["log_lines"] = {"sent": 0, "lost": 0}
    assert amphora.call("GET", "/v2/bundle") == (200, nothing)
    assert amphora.call("GET", "/v2/info")[1]["generation"] == 0
    heartbeat = eventually(lambda: (h := receiver.next()).epoch > epoch and h, "a heartbeat of the new start")
    said = heartbeat.document
    assert said.pop("agent_version") == amphora.call("GET", "/v2/info")[1]["agent_version"]
    # The use of resources depends on the machine of the test.
    said.pop("usage", None)
    assert said == {"generation": 0, "listeners": {}, "pools": {}, "holds_vip": None}
    assert amphora.status("haproxy") is None
    status, answer = amphora.push(6, secure(), files(certificate))
    assert (status, answer["generation"]) == (409, 7)
    # HAProxy refuses the bundle; the amphora serves no generation before and after it.
    assert amphora.push(7, secure(), {**files(certificate), PEM: "nothing\n"})[0] == 422
    assert amphora.call("GET", "/v2/bundle") == (200, nothing)
    status, answer = amphora.push(7, secure(), files(certificate))
    assert (status, answer.get("how")) == (200, "start"), answer
    assert presented(amphora) == certificate.der
    assert amphora.call("GET", "/v2/bundle")[1]["lost_generation"] is None
    eventually(lambda: receiver.next().document["generation"] == 7, "a heartbeat reports generation 7 again")
    assert amphora.push(7, secure(), files(certificate))[1]["how"] == "unchanged"


def test_the_limits_of_the_bundle_apply_up_to_the_limits_of_the_machine(amphora):
    def limits() -> tuple[int, int]:
        info = dict(re.findall(r"^(\w+): (\d+)$", amphora.ask_haproxy("show info"), re.MULTILINE))
        return int(info["Maxconn"]), int(info["Nbthread"])

    amphora.push(1, text(listener(["m1"])))
    machine = limits()
    other = {"drain": None, "workers": None}
    wanted = {"connections": 1000, "threads": 1, **other}
    status, answer = amphora.push(2, text(listener(["m1"])), limits=wanted)
    assert (status, answer["how"], answer["reason"]) == (200, "reload", "the limits of the process changed")
    assert limits() == (1000, 1)
    assert amphora.push(3, text(listener(["m1", "m2"])), limits=wanted)[1]["how"] == "runtime"
    assert amphora.push(4, text(listener(["m1"])), limits={"connections": 10**9, "threads": 10**9, **other})[0] == 200
    assert limits() == machine


def test_private_keys_are_in_their_files_only(network, authority, tmp_path, tenant):
    """Covers all operations on keys, with an agent at DEBUG."""
    network.plug()
    amphora = Amphora(network, tmp_path, authority, log_level="DEBUG")
    pairs = [tenant.issue("www.example.com", number=number) for number in range(4)]
    answers: list[object] = []

    def tell(method, path, body=None):
        answers.append(amphora.call(method, path, body))
        return answers[-1]

    def push(generation, wanted, content):
        answers.append(amphora.push(generation, wanted, content))
        return answers[-1][0]

    def logs() -> None:
        answers.extend(amphora.supervisor(op="log", name=name) for name in ("amphora-agent", "haproxy"))

    try:
        amphora.start()
        eventually(amphora.answers, "the agent answers")
        assert push(1, secure(), files(pairs[0])) == 200
        assert push(2, secure(), files(pairs[1])) == 200
        wrong = [
            {PEM: "nothing", LIST: pairs[2].key_pem},
            {PEM: pairs[2].key_pem, LIST: f"{PEM}\n"},
            {PEM: pairs[1].certificate_pem + pairs[2].key_pem, LIST: f"{PEM}\n"},
            {PEM: pairs[2].pem, LIST: pairs[2].key_pem.replace("\n", " [alpn x]\n")},
            {PEM: pairs[2].pem.replace("\n", "\nx", 12), LIST: f"{PEM}\n"},
        ]
        for content in wrong:
            assert push(3, secure(), content) == 422
        assert push(2, secure(), files(pairs[2])) == 409
        assert push(3, secure(), {**files(pairs[2]), f"tls/{LISTENER}/..": pairs[2].pem}) == 400
        assert push(3, secure(), {pairs[2].key_pem: "x"}) == 400
        assert tell("PUT", "/v2/bundle", json.dumps({"files": files(pairs[2])}).encode()[:-5])[0] == 400
        nowhere = [{"mac": "02:00:00:00:5e:99", "name": "eth1", "mtu": 1500, "addresses": [], "vips": [], "routes": []}]
        answers.append(amphora.push(3, secure(), files(pairs[3]), interfaces=nowhere))
        assert answers[-1][0] == 500
        tell("GET", "/v2/diagnostics")
        logs()
        kill_agent(amphora)
        tell("GET", "/v2/diagnostics")
        tell("GET", "/v2/bundle")
        logs()
        everything = json.dumps(answers) + amphora.log()
        root = Path(f"/proc/{amphora.init()}/root")
        written = {f: f.read_bytes() for f in written_files(root, tmp_path)}
        secret = run_directory(amphora) / "files"
        # The search works: it finds a key in its own file.
        assert any(tells(pairs[1], content) for file, content in written.items() if secret in file.parents)
        for pair in pairs:
            assert not tells(pair, everything.encode())
            for file, content in written.items():
                assert secret in file.parents or not tells(pair, content), file
    finally:
        amphora.power_off()
        network.unplug()


def tells(pair: pki.Certificate, content: bytes) -> bool:
    """Return whether the content has a part of a key; a key's first line contains only its type."""
    lines = pair.key_pem.splitlines()[2:-1]
    return any(line[n : n + 12].encode() in content for line in lines for n in range(0, len(line) - 11, 4))


def written_files(root: Path, directory: Path):
    """Yield every file of the amphora."""
    for place in (root / "run", root / "var/lib/amphora-agent", root / "etc/amphora-agent", directory):
        for file in place.rglob("*"):
            if file.is_file() and not file.is_symlink() and file.stat().st_size < 10**7 and "netns" not in file.parts:
                yield file


def test_no_process_or_file_of_the_amphora_remains(amphora, tenant):
    assert amphora.push(1, secure(), files(tenant.issue("www.example.com")))[0] == 200
    everything = descendants(amphora.init())
    amphora.terminate()
    assert not any(alive(pid) for pid in everything)
    assert not Path("/run/amphora-agent/files").exists()


@pytest.mark.parametrize("removed", [False, True])
def test_the_agent_recovers_from_a_kill_at_any_moment_of_a_push(amphora, tenant, removed):
    """Kills the agent at twelve moments of a push; the confirmed generation is served each time."""
    pairs = [tenant.issue("www.example.com", number=number) for number in (0, 1)]
    assert amphora.push(1, secure(), files(pairs[0]))[0] == 200
    began = time.monotonic()
    assert amphora.push(2, secure(), files(pairs[1]))[0] == 200
    usual = time.monotonic() - began
    generation, interrupted = 2, 0
    for step in range(12):
        generation += 1
        pair = pairs[step % 2]
        content = files(pair) if not removed else {**files(pair), f"tls/{POOL}/{step}.pem": pair.pem}
        pushing = Thread(target=push_quietly, args=(amphora, generation, content))
        pushing.start()
        pushing.join(step * usual / 10)
        interrupted += pushing.is_alive()
        kill_agent(amphora)
        pushing.join()
        known = amphora.call("GET", "/v2/bundle")[1]["generation"]
        assert known in (generation - 1, generation)
        expected = pair if known == generation else pairs[1 - step % 2]
        eventually(lambda expected=expected: shown(amphora) == expected.der, "the confirmed certificate is presented")
        eventually(lambda: len(sets(amphora)) == 1, "one set of files remains")
        eventually(lambda: not (amphora.var / "unfinished").exists(), "the change is finished")
        status, answer = amphora.push(generation, secure(), content)
        assert status == 200, answer
        assert presented(amphora) == pair.der
    assert interrupted > 2


def push_quietly(amphora, generation, content) -> None:
    with suppress(OSError, http.client.HTTPException):
        amphora.push(generation, secure(), content)
