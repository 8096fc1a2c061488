# SPDX-License-Identifier: Apache-2.0
"""This provider, plugged into the side-by-side benchmark (see README.md).

Every number is earned with the code that runs in production; what the incumbent writes for a heartbeat is written
here for each heartbeat too. Where the harness measures something that is not there, `NotImplementedError` says why.
"""

import hashlib
import os
import sys
import threading
import time
import uuid
from pathlib import Path

import msgspec
import sqlalchemy as sa
from adapter_metrics import Metrics
from adapters.api import Adapter
from cryptography.fernet import Fernet

from amphora_agent.paths import Paths
from amphora_agent.stats import codec
from amphora_agent.stats.ledger import Ledger as AgentLedger
from amphora_driver import config
from amphora_driver.capabilities import addresses
from amphora_driver.health import bookkeeper
from amphora_driver.health.heartbeat import amphora_id_of, open_datagram
from amphora_driver.health.ledger import Ledger
from amphora_driver.health.receiver import Receiver
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    L7Rule,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    Vip,
)
from amphora_driver.model.vocabulary import Algorithm, ListenerProtocol, MonitorType, PoolProtocol
from amphora_driver.render import haproxy
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, migrate, tables, wanted
from amphora_driver.store.amphorae import State
from amphora_driver.store.engine import Database
from amphora_driver.store.vault import Vault

GENERATION = 1
# Datagrams the UDP case prepares for each one it sends: the harness sends the same ones in every run, and a replay
# is refused.
_VARIANTS = 24
_ROUNDS = 10_000
_PATIENCE = 60.0


class Haproxy(Metrics, Adapter):
    """Rendering with nothing remembered; everything else as it is."""

    name = "haproxy"

    def __init__(self, workdir):
        super().__init__(workdir)
        self.folder = Path(workdir)
        self.database = None
        self._vault = Vault([Fernet.generate_key()])

    # --- render -------------------------------------------------------------------------------------------------------

    def render_setup(self, spec):
        self._tree = tree(spec)
        refused = haproxy.render(self._tree).refused
        if refused:
            raise NotImplementedError(f"not served yet: {refused[0]}")

    def render(self):
        forget()
        return haproxy.render(self._tree).text

    # --- graph --------------------------------------------------------------------------------------------------------

    def db_setup(self, url):
        migrate.upgrade(url)
        self.url = url
        self.database = Database(url, durable=False)  # as controller and health manager have it

    def db_add(self, specs):
        for spec in specs:
            self.database.write(lambda connection, spec=spec: self._record(connection, spec))

    def _record(self, connection, spec):
        whole = tree(spec)
        nodes = list(wanted.flatten(whole))
        connection.execute(
            tables.work.insert().values(
                load_balancer_id=whole.id, project_id=whole.project_id, op="apply", generation=GENERATION,
                committed=GENERATION, applied=GENERATION, read_back=False, dirty=False,
            )
        )  # fmt: skip
        wanted.insert(connection, whole.id, GENERATION, nodes)
        rows = [
            {
                "object_id": node.id, "kind": wanted.kind_of(node).value, "load_balancer_id": whole.id,
                "provisioning": "ACTIVE", "operating": "ONLINE", "since": time.time(), "version": 1, "reported": 1,
            }
            for node in nodes
        ]  # fmt: skip
        connection.execute(tables.status.insert(), rows)
        for one in spec["amphorae"]:
            sealed = self._vault.seal(heartbeat_key(one["id"]))
            amphorae.record(connection, one["id"], whole.id, one["role"], sealed)
            amphorae.change(
                connection, one["id"], state=State.READY, confirmed=GENERATION, compute_id=one["compute_id"],
                management_address=one["lb_network_ip"], plugged=(), ready_at=time.time(),
            )  # fmt: skip

    def graph_load(self, lb_id):
        """What a controller reads for one round of work."""

        def read(connection):
            work = connection.execute(sa.select(tables.work).where(tables.work.c.load_balancer_id == lb_id)).one()
            return work, amphorae.of_load_balancer(connection, lb_id), wanted.load_tree(connection, lb_id)

        return self.database.read(read)

    def sql_count(self, on):
        """Statements without BEGIN: with SQLite we begin transactions ourselves, which others leave to the driver."""
        engine = self.database.engine
        if on:
            self._counted = {"statements": 0, "commits": 0}

            def statement(_connection, _cursor, text, *_more):
                self._counted["statements"] += not text.startswith("BEGIN")

            def commit(_connection):
                self._counted["commits"] += 1

            self._listening = (("before_cursor_execute", statement), ("commit", commit))
            for listening in self._listening:
                sa.event.listen(engine, *listening)
            return None
        for listening in self._listening:
            sa.event.remove(engine, *listening)
        return self._counted

    # --- heartbeats received ------------------------------------------------------------------------------------------

    def hb_setup(self, key):  # noqa: ARG002 - here every amphora has a key of its own
        self._keys = {}
        self._numbers = {}
        self._epoch, self._offset = 1, 0
        self._variants, self._batch, self._drained = 0, [], False
        self._ledger = Ledger()
        self._unwritten = set()
        # Each heartbeat's moment is written down, although the runs are shorter than the usual second between two.
        bookkeeper._SEEN_EVERY = 0.0  # noqa: SLF001
        self._bookkeeper = bookkeeper.Bookkeeper(self.database, self._ledger)

    def hb_encode(self, message):
        if self._drained:
            self._drained, self._batch = False, []
            self._epoch += _VARIANTS
            self._offset += _VARIANTS * _ROUNDS
        made = Sent()
        self._encode(made, message)
        made.later = [self._datagrams(message, variant)[0] for variant in range(1, _VARIANTS * self._variants)]
        self._batch += [made] * self._variants
        return made

    def _encode(self, made, message):
        self._numbers[message["id"]] = self._numbers.get(message["id"], 0) + 1
        first, *rest = self._datagrams(message, 0)
        made[:] = first
        made.rest = rest
        made.message, made.used = message, False

    def _datagrams(self, message, variant):
        """As the agent makes them; counters are absolute, so the deltas of the message are added up."""
        number = self._numbers[message["id"]]
        times = number + self._offset + variant * _ROUNDS
        listeners = {
            listener: {
                "status": said["status"],
                "active_connections": said["stats"]["conns"],
                "bytes_in": said["stats"]["rx"] * times,
                "bytes_out": said["stats"]["tx"] * times,
                "request_errors": said["stats"]["ereq"] * times,
                "total_connections": said["stats"]["totconns"] * times,
            }
            for listener, said in message["listeners"].items()
        }
        document = {"generation": GENERATION, "listeners": listeners, "pools": message["pools"]}
        amphora = message["id"]
        key = self._keys.setdefault(amphora, heartbeat_key(amphora)).reveal()
        return list(codec.datagrams(uuid.UUID(amphora), key, self._epoch + variant, number << 8, document))

    def hb_decode(self, datagram):
        for part in (datagram, *datagram.rest):
            open_datagram(part, self._keys[amphora_id_of(part)])

    def hb_apply(self, datagram):
        if datagram.used:  # the harness applies its first batch twice; a replay would be refused
            self._encode(datagram, datagram.message)
        datagram.used = True
        if datagram.message["id"] in self._unwritten:
            self.hb_flush()
        for part in (datagram, *datagram.rest):
            self._hear(open_datagram(part, self._keys[amphora_id_of(part)]))

    def _hear(self, heartbeat):
        if not self._ledger.accept(heartbeat, time.monotonic()):
            raise RuntimeError(f"heartbeat {heartbeat.epoch}/{heartbeat.sequence} is not news")
        self._unwritten.add(heartbeat.amphora_id)

    def hb_flush(self):
        """Once a round: batches span load balancers, as in production, never heartbeats of one amphora."""
        self._bookkeeper.flush()
        self._unwritten.clear()

    def hb_check(self, lb_id):
        def read(connection):
            rows = connection.execute(sa.select(tables.status).where(tables.status.c.load_balancer_id == lb_id)).all()
            counters = tables.listener_statistics.c
            total = sa.select(sa.func.sum(counters.total_connections)).where(counters.load_balancer_id == lb_id)
            seen = (
                sa.select(sa.func.max(tables.amphora_seen.c.seen_at))
                .join(tables.amphora, tables.amphora.c.id == tables.amphora_seen.c.amphora_id)
                .where(tables.amphora.c.load_balancer_id == lb_id)
            )
            return {
                "lb": next(row.operating for row in rows if row.object_id == lb_id),
                "members": {row.object_id: row.operating for row in rows if row.kind == "members"},
                "stats_total_connections": int(connection.execute(total).scalar() or 0),
                "amp_age_s": time.time() - connection.execute(seen).scalar(),
            }

        return self.database.read(read)

    # --- heartbeats over UDP ------------------------------------------------------------------------------------------

    def udp_start(self, port, workers):  # noqa: ARG002 - one process hears, others stand by
        self._variants = 1
        self._left, self._gate, self._done = 0, threading.Event(), threading.Event()
        self._receiver = Receiver("127.0.0.1", port, self._key, self._received)
        threading.Thread(target=self._receiver.run, daemon=True).start()

    def _key(self, amphora_id):
        return self.database.read(lambda connection: amphorae.heartbeat_key(connection, self._vault, amphora_id))

    def _received(self, heartbeat):
        # Everything waits in the socket until the clock runs.
        self._gate.wait()
        if heartbeat.amphora_id in self._unwritten:
            self.hb_flush()
        self._hear(heartbeat)
        self._left -= 1
        if self._left == 0:
            self.hb_flush()
            self._gate.clear()
            self._done.set()

    def udp_drain(self, n):
        self._left = n
        self._done.clear()
        self._gate.set()
        if not self._done.wait(_PATIENCE) or self._receiver.refused:
            raise RuntimeError(f"{self._left} of {n} datagrams are missing; refused: {self._receiver.refused}")
        self._drained = True
        for one in self._batch:
            one[:] = one.later.pop(0)

    # --- heartbeats sent ----------------------------------------------------------------------------------------------

    def beat_setup(self, lb_id, sock, pid, config, key):  # noqa: ARG002
        paths = Paths(self.folder / f"beat-{lb_id}")
        for folder in (paths.run, paths.var):
            folder.mkdir(parents=True, exist_ok=True)
        paths.stats_socket.unlink(missing_ok=True)
        paths.stats_socket.symlink_to(sock)
        self._agent_ledger = AgentLedger(paths)
        self._amphora, self._sequence = uuid.UUID(lb_id), 0

    def beat(self):
        """What the agent's sender does: sample, write the counters down, say everything."""
        self._agent_ledger.sample()
        document = self._agent_ledger.document(GENERATION)
        self._agent_ledger.write()
        self._sequence += 1
        key = heartbeat_key(str(self._amphora)).reveal()
        (datagram,) = codec.datagrams(self._amphora, key, 1, self._sequence, document)
        return datagram

    def beat_members(self, datagram):
        report = open_datagram(datagram, heartbeat_key(str(self._amphora))).report
        return sum(len(pool.members) for pool in report.pools.values())

    # --- calls of Octavia's -------------------------------------------------------------------------------------------

    def provider_setup(self, spec):
        conf = self.folder / "amphora-driver.conf"
        conf.write_text(
            f"[store]\nconnection = {self.url.replace('%', '%%')}\n[queue]\ndoorbell_dir = {self.folder}/bells\n"
        )
        os.environ[config.FILE_VARIABLE] = str(conf)
        from octavia_lib.api.drivers import data_models  # noqa: PLC0415 - other cases measure what is imported

        from amphora_driver.driver import AmphoraProviderDriver  # noqa: PLC0415

        provider = AmphoraProviderDriver()
        listener, pool, project = spec["listeners"][0], spec["pools"][0], spec["project_id"]
        common = {"project_id": project, "admin_state_up": True}
        member = data_models.Member(
            member_id="", pool_id=pool["id"], address="10.1.1.1", protocol_port=80, weight=1, backup=False, name="m",
            subnet_id=spec["vip"]["subnet_id"], monitor_address=None, monitor_port=None, **common,
        )  # fmt: skip
        http = data_models.Listener(
            listener_id="", name="l", loadbalancer_id=spec["id"], protocol="HTTP", protocol_port=8080,
            connection_limit=2000, default_pool_id=pool["id"], insert_headers=listener["insert_headers"],
            timeout_client_data=50000, timeout_member_connect=5000, timeout_member_data=50000, timeout_tcp_inspect=0,
            description="", **common,
        )  # fmt: skip
        balancer = data_models.LoadBalancer(
            loadbalancer_id="", name="lb", vip_address=spec["vip"]["ip"], vip_network_id=spec["vip"]["network_id"],
            vip_port_id=spec["vip"]["port_id"], vip_subnet_id=spec["vip"]["subnet_id"], **common,
        )  # fmt: skip
        another = data_models.Pool(
            pool_id="", name="p", loadbalancer_id=spec["id"], protocol="HTTP", lb_algorithm="ROUND_ROBIN", members=[],
            **common,
        )  # fmt: skip
        self._calls = {
            "member_create": (provider.member_create, member, "member_id"),
            "listener_create": (provider.listener_create, http, "listener_id"),
            "loadbalancer_create": (provider.loadbalancer_create, balancer, "loadbalancer_id"),
            "pool_create": (provider.pool_create, another, "pool_id"),
        }

    def provider_call(self, call):
        """Each object is a new one: what is recorded stays."""
        if call not in self._calls:
            raise NotImplementedError(f"{call}: TLS is not served yet, and calls make no dictionaries")
        method, source, name = self._calls[call]
        setattr(source, name, str(uuid.uuid4()))
        method(source)

    # --- what it takes to run -----------------------------------------------------------------------------------------

    def imports(self):
        return {
            "provider-driver": "import amphora_driver.driver",
            "worker": "import amphora_driver.controller.service",
            "health-manager": "import amphora_driver.health.service",
            "agent": "import amphora_agent.server",
        }

    def closures(self):
        """Top-level requirements by extra, since the package itself requires nothing."""
        from importlib import metadata  # noqa: PLC0415

        from packaging.requirements import Requirement  # noqa: PLC0415

        found = {"driver": [], "agent": []}
        for text in metadata.requires("octavia-amphora-driver"):
            one = Requirement(text)
            for extra, names in found.items():
                if one.marker and one.marker.evaluate({"extra": extra}):
                    names.append(one.name)
        return {
            "agent image": ["octavia-amphora-driver", *found["agent"]],
            "control plane": ["octavia-amphora-driver", *found["driver"]],
        }

    def processes(self):
        etc = self.folder / "etc"
        conf = _configuration(etc)
        return [
            {
                "name": "amphora-controller", "expect": 2, "env": {config.FILE_VARIABLE: str(conf)},
                "argv": [sys.executable, "-m", "amphora_driver.controller.service"],
            },
            {
                "name": "amphora-health-manager", "expect": 2, "env": {config.FILE_VARIABLE: str(conf)},
                "argv": [sys.executable, "-m", "amphora_driver.health.service"],
            },
            {
                "name": "amphora-agent", "expect": 2,
                "argv": ["unshare", "--mount", "/bin/sh", "-c", _agent_script(self.folder / "agent")],
            },
        ]  # fmt: skip


class Remembering(Haproxy):
    """Rendering the very same load balancer again: every server line is remembered."""

    name = "haproxy-remembering"

    def render(self):
        return haproxy.render(self._tree).text


class OneChanged(Haproxy):
    """Rendering after one member changed, from objects read anew: what a controller does all day."""

    name = "haproxy-one-changed"

    def render_setup(self, spec):
        super().render_setup(spec)
        self._copies = [msgspec.json.decode(msgspec.json.encode(self._tree), type=LoadBalancer) for _ in range(8)]
        self._turn = 0

    def render(self):
        whole = self._copies[self._turn % len(self._copies)]
        pool, *pools = whole.pools
        member, *members = pool.members
        self._turn += 1
        changed = msgspec.structs.replace(member, protocol_port=1024 + self._turn % 60_000)
        pool = msgspec.structs.replace(pool, members=(changed, *members))
        return haproxy.render(msgspec.structs.replace(whole, pools=(pool, *pools))).text


class Sent(bytearray):
    """A datagram that can be made anew in its place, and what it was made of."""

    __slots__ = ("later", "message", "rest", "used")


def heartbeat_key(amphora_id):
    """Each amphora's own."""
    return Secret(hashlib.sha256(amphora_id.encode()).digest())


def forget():
    """Empty every cache the renderer has."""
    haproxy.forget()
    for remembered in vars(addresses).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()


def tree(spec):
    """The harness's description as our model."""
    vip = spec["vip"]
    return LoadBalancer(
        id=spec["id"],
        project_id=spec["project_id"],
        name=spec["name"],
        vip=Vip(address=vip["ip"], subnet_id=vip["subnet_id"], network_id=vip["network_id"], port_id=vip["port_id"]),
        listeners=tuple(_listener(spec["id"], one) for one in spec["listeners"]),
        pools=tuple(_pool(spec["id"], one) for one in spec["pools"]),
    )


def _listener(load_balancer_id, one):
    tls = {}
    if one["tls"]:
        tls = {
            "default_tls_container_ref": one["tls_ref"],
            "tls_versions": ("TLSv1.2", "TLSv1.3"),
            "alpn_protocols": ("h2", "http/1.1"),
        }
    return Listener(
        id=one["id"],
        loadbalancer_id=load_balancer_id,
        name=one["name"],
        protocol=ListenerProtocol(one["protocol"]),
        protocol_port=one["port"],
        connection_limit=one["connection_limit"],
        default_pool_id=one["default_pool_id"],
        insert_headers=tuple(one["insert_headers"]) or None,
        l7policies=tuple(_policy(one["id"], policy) for policy in one["l7policies"]),
        **tls,
    )


def _policy(listener_id, one):
    fields = ("id", "action", "position", "redirect_pool_id", "redirect_url", "redirect_prefix", "redirect_http_code")
    rules = tuple(
        L7Rule(l7policy_id=one["id"], **{name: rule[name] for name in L7Rule.__struct_fields__ if name in rule})
        for rule in one["rules"]
    )
    return L7Policy(listener_id=listener_id, rules=rules, **{name: one[name] for name in fields})


def _pool(load_balancer_id, one):
    monitor = one["healthmonitor"]
    return Pool(
        id=one["id"],
        loadbalancer_id=load_balancer_id,
        name=one["name"],
        protocol=PoolProtocol(one["protocol"]),
        lb_algorithm=Algorithm(one["algorithm"]),
        members=tuple(
            Member(
                id=member["id"],
                pool_id=one["id"],
                name="m",
                address=member["ip"],
                protocol_port=member["port"],
                weight=member["weight"],
            )
            for member in one["members"]
        ),
        healthmonitor=HealthMonitor(
            id=monitor["id"],
            pool_id=one["id"],
            name="hm",
            type=MonitorType(monitor["type"]),
            delay=monitor["delay"],
            timeout=monitor["timeout"],
            max_retries=monitor["rise"],
            max_retries_down=monitor["fall"],
            http_method=monitor["http_method"],
            url_path=monitor["url_path"],
            expected_codes=monitor["expected_codes"],
        ),
    )


def _configuration(etc):
    """Everything a controller and a health manager read when they start."""
    from amphora_driver.certificates.authority import Authority, create_authority  # noqa: PLC0415

    etc.mkdir(parents=True, exist_ok=True)
    certificate, key = create_authority("bench amphorae")
    (etc / "amphora_ca.pem").write_bytes(certificate)
    (etc / "amphora_ca.key").write_bytes(key.reveal())
    certificate, key = create_authority("bench controllers")
    (etc / "controller_ca.pem").write_bytes(certificate)
    (etc / "controller.pem").write_bytes(Authority(certificate, key).issue_client("bench", 30).bundle().reveal())
    (etc / "encryption.keys").write_bytes(Fernet.generate_key())
    for path in etc.iterdir():
        path.chmod(0o600)
    migrate.upgrade(f"sqlite:///{etc}/store.sqlite")
    conf = etc / "amphora-driver.conf"
    conf.write_text(
        f"""[store]
connection = sqlite:///{etc}/store.sqlite
encryption_key_file = {etc}/encryption.keys
[queue]
doorbell_dir = {etc}/bells
[health]
bind_address = 127.0.0.1
bind_port = 15557
[compute_netns]
directory = {etc}/amphorae
agent_python = {sys.executable}
[certificates]
ca_certificate = {etc}/amphora_ca.pem
ca_private_key = {etc}/amphora_ca.key
client_ca = {etc}/controller_ca.pem
client_certificate = {etc}/controller.pem
"""
    )
    return conf


def _agent_script(folder):
    """Start the agent in a mount namespace of its own: its paths are fixed."""
    from amphora_driver.certificates.authority import Authority, create_authority  # noqa: PLC0415

    amphora = str(uuid.uuid4())
    etc = folder / "etc"
    etc.mkdir(parents=True, exist_ok=True)
    certificate, key = create_authority("bench")
    (etc / "client_ca.pem").write_bytes(certificate)
    (etc / "server.pem").write_bytes(Authority(certificate, key).issue_server(amphora, 30).bundle().reveal())
    (etc / "heartbeat.key").write_text(heartbeat_key(amphora).reveal().hex())
    (etc / "agent.conf").write_text(
        f"[agent]\namphora_id = {amphora}\nbind_address = 127.0.0.1\nbind_port = 15558\nservices = supervisor\n"
        "[heartbeat]\ntargets = 127.0.0.1:15559\n"
    )
    (folder / "all-etc").mkdir(exist_ok=True)
    return f"""set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
cp -a /etc/. {folder}/all-etc
mount --bind {folder}/all-etc /etc
mkdir -p /etc/amphora-agent /run/netns
cp -a {etc}/. /etc/amphora-agent
ip netns add amphora-haproxy
exec {sys.executable} -m amphora_agent.server
"""
