# SPDX-License-Identifier: Apache-2.0
"""Every HAProxy that tests can run: the system's, and newer versions.

./run-tests downloads newer versions where possible. Tests skip a missing version: see `VERSIONS` and `HAProxy.here`.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_FETCHED = Path(__file__).parents[1] / ".sandbox" / "haproxy"


@dataclass(frozen=True)
class HAProxy:
    """One HAProxy. `series` is a release line, or "system" for the version of the distribution."""

    series: str

    @property
    def program(self) -> str | None:
        found = "haproxy" if self.series == "system" else str(_FETCHED / self.series / "haproxy")
        return shutil.which(found)

    @property
    def version(self) -> str | None:
        return _output(self.program, "-v").split()[2] if self.program else None

    @property
    def pcre2(self) -> bool:
        """Return whether its regular expressions use PCRE2, as in every distribution."""
        return "+PCRE2 " in _output(self._started(), "-vv")

    def here(self) -> HAProxy:
        """Return this HAProxy; skip the running test if this machine does not have it."""
        if self.program is None:
            log = f".sandbox/haproxy/{self.series}.log"
            pytest.skip(
                f"HAProxy {self.series} is not on this machine: ./run-tests downloads it where possible, see {log}"
            )
        return self

    def complaint(self, *files: Path) -> str | None:
        """Return the output of `haproxy -c` with warnings; None if HAProxy accepts these files."""
        command = [self._started(), "-c", "-dW", *(word for file in files for word in ("-f", str(file)))]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        return None if run.returncode == 0 else run.stderr or f"ended with {run.returncode}"

    def words(self, file: Path) -> list[str]:
        """Return the file's lines after HAProxy's tokenizer: no comments, no quotes, a space after each word."""
        run = subprocess.run([self._started(), "-dC", "-f", str(file)], capture_output=True, check=True)
        found = [line.strip("\t") for line in run.stdout.decode().split("\n") if line.strip("\t")]
        # From version 3.1 on, HAProxy reads and reports each line twice: for the master and for the worker.
        half = len(found) // 2
        return found[:half] if found[:half] == found[half:] else found

    def _started(self) -> str:
        assert self.program
        return self.program

    def __str__(self) -> str:
        return self.series


@lru_cache
def _output(program: str, option: str) -> str:
    return subprocess.run([program, option], capture_output=True, text=True, check=True).stdout


VERSIONS = tuple(HAProxy(series) for series in ("system", "2.8", "3.0", "3.2"))
NEWER = VERSIONS[1:]
every_version = pytest.mark.parametrize("version", VERSIONS, ids=str)
"""For tests with a parameter `version`; they begin with `version.here()`."""


def header() -> str:
    """Return the versions of this run, for pytest's header."""
    return "haproxy: " + ", ".join(f"{each.series} ({each.version or 'not here'})" for each in VERSIONS)


# HAProxy opens a server's certificate after the whole file, and not from `default-path` (2.6). So the agent has a
# frontend that opens these files earlier.
MACHINE = """\
global
    server-state-file {folder}/state
    default-path origin {folder}
    httpclient.ssl.verify none
    localpeer here
peers amphora
    peer here 127.0.0.1:1025
backend amphora:metrics
    mode http
    timeout connect 1s
    timeout server 1s
"""


def machine(folder: Path, files: Iterable[object] = ()) -> Path:
    """Write the agent's part before a load balancer's text; return its file.

    It has the `global` section and the names that the text may use. HAProxy 2.6 opens the certificates of servers only
    after it has left the directory. As in the agent, a frontend that is never bound opens them before.
    """
    folder.mkdir(exist_ok=True)
    (folder / "state").write_text("1\n")
    file = folder / "machine.cfg"
    shown = [one.name for one in files if one.name.endswith("/client.pem")]
    binds = "".join(f"    bind 127.0.0.1:9103 ssl crt {name}\n" for name in shown)
    file.write_text(MACHINE.format(folder=folder) + (f"frontend certificates\n    disabled\n{binds}" if binds else ""))
    return file


def complaints(haproxy: HAProxy, rendered: Mapping[str, object], folder: Path) -> dict[str, str]:
    """Return the output of `haproxy -c` for rendered load balancers by name, without accepted ones."""

    def ask(item: tuple[str, object]) -> tuple[str, str | None]:
        name, result = item
        place = folder / name
        files = getattr(result, "files", ())
        top = machine(place, files)
        (place / "lb.cfg").write_text(result.text)
        write_files(files, place)
        return name, haproxy.complaint(top, place / "lb.cfg")

    secrets()  # created once, not by both threads
    with ThreadPoolExecutor(2) as pool:
        return {name: said for name, said in pool.map(ask, rendered.items()) if said is not None}


def write_files(files: Iterable[object], folder: Path) -> None:
    """Write the files of a rendered text: content of the renderer, or a temporary secret."""
    for file in files:
        path = folder / file.name
        assert path.resolve().is_relative_to(folder.resolve()), file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content if file.content is not None else secrets()[str(file.secret.purpose)])


@lru_cache
def secrets() -> Mapping[str, str]:
    """Return one PEM for each purpose."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "www.example.com")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )
    revoked = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(name)
        .last_update(now - timedelta(days=1))
        .next_update(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    keys = "".join(f"{base64.b64encode(bytes([n]) * 80).decode()}\n" for n in range(3))
    return {"certificate": certificate + private, "ca": certificate, "crl": revoked, "tickets": keys}
