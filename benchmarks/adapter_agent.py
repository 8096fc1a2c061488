# SPDX-License-Identifier: Apache-2.0
"""The case `agent` of the harness: a real agent with HAProxy, and bundles as from a controller.

The harness sends the same bodies repeatedly, but an agent refuses a generation that does not increase. Therefore,
`side_by_side.py` replaces `GENERATION` in a body by the next number, and `LIMIT` by a different limit, which requires a
reload.
"""

import base64
import json
import shutil
import sys
from pathlib import Path

import msgspec
from adapter_heartbeats import heartbeat_key
from adapter_tree import tree

import amphora_agent
from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.render import haproxy
from amphora_driver.render.bundle import Served, bundle

GENERATION, LIMIT = 4_000_000_001, 4_000_000_002
_MAC = "02:00:00:00:5e:0b"
# The agent that this interpreter imports.
_PACKAGE = Path(amphora_agent.__file__).parents[1]
_SCRIPT = """set -e
export PYTHONPATH={package}
unshare --fork --kill-child=KILL --pid --mount --uts --ipc --propagation private --mount-proc -- \
    {python} -m amphora_agent.services.supervisor {folder}/spec.json &
until inner=$(cat /proc/$!/task/$!/children 2>/dev/null); inner=${{inner%% *}}; [ -n "$inner" ]; do sleep 0.01; done
# Create the amphora's interface in the namespace where the agent expects it.
inside() {{ nsenter --target "$inner" --mount -- ip -n amphora-haproxy "$@"; }}
until inside link show lo >/dev/null 2>&1; do sleep 0.01; done
inside link add new0 address {mac} type veth peer name switch
inside link set switch up
ln -sfn "/proc/$inner/root/run/amphora-agent/haproxy.sock" {folder}/haproxy.sock
wait
"""


class Agent:
    """An amphora in namespaces; its agent listens in the network namespace of the harness."""

    def agent_prepare(self, pki, spec, spec2, port):
        folder = Path(self.workdir) / "agent"
        shutil.rmtree(folder, ignore_errors=True)
        amphora = spec["amphorae"][0]["id"]
        _etc(folder / "etc", amphora, pki, port)
        (folder / "var").mkdir()
        document = {"hostname": "amphora", "etc": str(folder / "etc"), "var": str(folder / "var")}
        (folder / "spec.json").write_text(json.dumps({**document, "python": sys.executable}))
        whole = tree(spec)
        without, with_marker = _bundle(whole, spec, amphora), _bundle(_with(whole, spec2["marker"]), spec, amphora)
        push = {name: [("PUT", "/v2/bundle", base64.b64encode(body).decode(), "application/json")] for name, body in (
            ("config_a", without), ("config_b", with_marker),
            ("full_push_a", without), ("full_push_b", with_marker),
            ("upload_only", without), ("reload_only", _limited(without)),
        )}  # fmt: skip
        return {
            "script": _SCRIPT.format(python=sys.executable, folder=folder, mac=_MAC, package=_PACKAGE),
            "log": str(folder / "agent.out"),
            "url": f"https://127.0.0.1:{port}",
            "stats_sock": str(folder / "haproxy.sock"),
            "ready": ["GET", "/v2/info", None, None],
            "requests": {
                "info": [("GET", "/v2/info", None, None)],
                "details": [("GET", "/v2/diagnostics", None, None)],
                **push,
            },
            "marker": spec2["marker"],
            "config_bytes": len(json.loads(without)["haproxy"]),
        }


def _etc(etc, amphora, pki, port):
    etc.mkdir(parents=True)
    shutil.copy(pki["ca"], etc / "client_ca.pem")
    shutil.copy(pki["server_pem"], etc / "server.pem")
    (etc / "heartbeat.key").write_text(heartbeat_key(amphora).reveal().hex())
    (etc / "agent.conf").write_text(
        f"[agent]\namphora_id = {amphora}\nbind_address = 127.0.0.1\nbind_port = {port}\nservices = supervisor\n"
        "[heartbeat]\ninterval = 3\ntargets = 127.0.0.1:15999\n"
    )


def _with(whole, marker):
    """The load balancer with an additional member."""
    first, *others = whole.pools
    member = msgspec.structs.replace(first.members[0], id=marker, address="10.249.0.1")
    first = msgspec.structs.replace(first, members=(*first.members, member))
    return msgspec.structs.replace(whole, pools=(first, *others))


def _bundle(whole, spec, amphora):
    rendered = haproxy.render(whole)
    if rendered.refused or rendered.files:
        raise RuntimeError("the renderer has omitted objects, or the load balancer has files")
    vip, network = spec["vip"], spec["vip"]["ip"].rpartition(".")[0]
    plugged = AttachedPort(
        port=Port(
            id=vip["port_id"], network_id=vip["network_id"], mac=_MAC, mtu=1500,
            addresses=(FixedAddress(subnet_id=vip["subnet_id"], address=f"{network}.20"),),
        ),
        subnets=(Subnet(id=vip["subnet_id"], network_id=vip["network_id"], cidr=f"{network}.0/24", gateway=None),),
    )  # fmt: skip
    served = Served(text=rendered.text, files=(), pings=dict(rendered.pings))
    return bundle(whole, GENERATION, amphora, (plugged,), served)


def _limited(body):
    document = json.loads(body)
    document["limits"]["connections"] = LIMIT
    return json.dumps(document, separators=(",", ":")).encode()
