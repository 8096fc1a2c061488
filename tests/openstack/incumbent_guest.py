# SPDX-License-Identifier: Apache-2.0
"""The guest of an amphora of Octavia's own provider: its file system, its services and its unchanged agent.

    incumbent_guest.py FOLDER PROGRAMS

The hypervisor starts it as the first process of its own process, mount and network namespaces. FOLDER/root has the
files of the config drive. PROGRAMS is the directory of `amphora-agent`, `amphora-interface` and `haproxy-vrrp-check`
of the package `octavia`. The image of Octavia has systemd; here `incumbent_units.py` interprets the units. UDP needs
IPVS in the kernel; here `incumbent_udp.py` forwards datagrams in place of keepalived.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from incumbent_units import Units  # noqa: E402 - Python's option -I removes the directory

_CONTROL = "/run/units.sock"
_LOG = Path("/run/rsyslog/octavia/log")
_DATA = Path("/var/lib/octavia")
# Further options of the agent: without systemd, its log is the console.
_OPTIONS = "[DEFAULT]\nuse_syslog = False\nuse_stderr = True\n"
_PYTHON = f"{sys.executable} -I -S"
_UDP = f"{_PYTHON} {HERE / 'incumbent_udp.py'}"
# The agent and its units call these programs.
_SCRIPTS = {
    "systemctl": f'#!/bin/sh\nexec {_PYTHON} {HERE / "incumbent_guest.py"} --systemctl "$@"\n',
    # The masquerade of IPVS. `incumbent_udp.py` sends from the address of the amphora.
    "lvs-masquerade.sh": "#!/bin/sh\nexit 0\n",
    # The heartbeats of UDP listeners contain the state of IPVS.
    "ipvsadm": f'#!/bin/sh\ncase "$*" in *--stats*) exec {_UDP} counters;; esac\nexec {_UDP} list\n',
    "cat": f'#!/bin/sh\n[ "$*" = /proc/net/ip_vs ] || exec /bin/cat "$@"\nexec {_UDP} table\n',
    # The settings of this machine are not those of a guest. HAProxy of a pair binds VIPs that its partner may have.
    "sysctl": '#!/bin/sh\n[ "$1" = --system ] || exec /sbin/sysctl "$@"\n'
    "exec /sbin/sysctl -w net.ipv4.ip_nonlocal_bind=1 net.ipv6.ip_nonlocal_bind=1\n",
}
_KEEPALIVED, _REAL_KEEPALIVED = Path("/usr/sbin/keepalived"), Path("/run/private/keepalived")
# Only the unit of a UDP listener has an option for the checker's process id. All other units run keepalived itself.
_KEEPALIVED_SCRIPT = (
    f'#!/bin/sh\ncase " $* " in *" -c "*) exec {_UDP} serve "$@";; esac\nexec {_REAL_KEEPALIVED} "$@"\n'
)
# The memory of a small amphora in KiB. Octavia's worker gives half of the free memory to HAProxy's TLS sessions, and
# HAProxy allocates it at its start. With the memory of this machine, the kernel ended HAProxy of a pair with TLS.
_MEMORY = {"MemTotal": 1 << 20, "MemFree": 1 << 18, "Buffers": 0, "Cached": 0, "SwapCached": 0, "Shmem": 0, "Slab": 0}


def build(folder):
    """Mount private directories, and write the files of the config drive and of the image."""
    _mount("-t", "tmpfs", "-o", "mode=755,size=64m", "tmpfs", "/run")
    for place in (Path("/etc"), Path("/var/lib")):
        upper, work = (Path("/run/private", place.name, part) for part in ("upper", "work"))
        for part in (upper, work):
            part.mkdir(parents=True)
        _mount("-t", "overlay", "-o", f"lowerdir={place},upperdir={upper},workdir={work}", "overlay", place)
    for name, place in (("log", "/var/log"), ("units", "/usr/lib/systemd/system"), ("bin", "/usr/local/bin")):
        (folder / name).mkdir(exist_ok=True)
        _mount("--bind", folder / name, place)
    root = folder / "root"
    for source in (one for one in root.rglob("*") if one.is_file()):
        target = Path("/", source.relative_to(root))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    Path("/etc/octavia/lab.conf").write_text(_OPTIONS)
    _DATA.mkdir(exist_ok=True)
    # The workers of HAProxy, which are not root, use it.
    _DATA.chmod(0o755)
    (_DATA / "haproxy-default-user-group.conf").write_text("global\n    group nogroup\n")
    for name, text in _SCRIPTS.items():
        path = Path("/usr/local/bin", name)
        path.write_text(text)
        path.chmod(0o755)
    memory = Path("/run/private/meminfo")
    memory.write_text("".join(f"{name}: {size} kB\n" for name, size in _MEMORY.items()))
    _mount("--bind", memory, "/proc/meminfo")
    shutil.copy(_KEEPALIVED, _REAL_KEEPALIVED)
    script = _REAL_KEEPALIVED.with_suffix(".sh")
    script.write_text(_KEEPALIVED_SCRIPT)
    script.chmod(0o755)
    _mount("--bind", script, _KEEPALIVED)


def serve():
    """Handle the requests of systemctl and the log, in threads."""
    _LOG.parent.mkdir(parents=True)
    log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    log.bind(str(_LOG))
    _LOG.chmod(0o666)
    threading.Thread(target=_write_log, args=(log,), daemon=True).start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_CONTROL)
    listener.listen()
    threading.Thread(target=_answer, args=(listener, Units()), daemon=True).start()


def _write_log(log):
    with Path("/var/log/octavia.log").open("ab", buffering=0) as file:
        while True:
            file.write(log.recv(65536) + b"\n")


def _answer(listener, units):
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            argv = json.loads(stream.readline())
            status, said = units.handle(argv)
            print(f"systemctl {' '.join(argv)}: {status} {said}", flush=True)  # noqa: T201 - the console of the guest
            with suppress(OSError):
                stream.write(json.dumps([status, said]) + "\n")
                stream.flush()


def systemctl(argv):
    """Send a command to the first process of the guest; return its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_CONTROL)
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(argv) + "\n")
            stream.flush()
            status, said = json.loads(stream.readline())
    print(said)  # noqa: T201 - the agent reads it
    return status


def _mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)


def _reap(child):
    """Collect the ended daemons of the guest until its services end."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def main(folder, programs):
    """Run the guest until its agent ends."""
    build(folder)
    # Temporary files of the agent end with the guest.
    os.environ |= {"PATH": f"/usr/local/bin:{programs}:/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": "/run", "HOME": "/run"}
    child = os.fork()
    if child:
        return _reap(child)
    serve()
    files = [word for name in ("amphora-agent", "lab") for word in ("--config-file", f"/etc/octavia/{name}.conf")]
    # As a unit, it has the working directory / (systemd.exec(5)).
    return subprocess.run([f"{programs}/amphora-agent", *files], cwd="/", check=False).returncode


if __name__ == "__main__":
    if sys.argv[1] == "--systemctl":
        sys.exit(systemctl(sys.argv[2:]))
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
