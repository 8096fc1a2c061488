# SPDX-License-Identifier: Apache-2.0
"""The options of the compute backends that come with this provider; `config` registers them.

Invariant: they are here and not with the backends, because octavia-api reads the same file and never imports a backend.
"""

from __future__ import annotations

from oslo_config import cfg

COMPUTE_NETNS = [
    cfg.StrOpt(
        "directory",
        default="/var/lib/amphora-driver/amphorae",
        help="Directory with one folder for each amphora: its /etc, /var/lib and log.",
    ),
    cfg.StrOpt("prefix", default="amp", help="Beginning of the names of namespaces; at most 6 characters."),
    cfg.StrOpt(
        "agent_python",
        default="/opt/amphora-agent/bin/python",
        help="Python interpreter of the environment in which the agent is installed.",
    ),
    cfg.StrOpt("management_network", default="management", help="Id of the network the agents are reached on."),
]
COMPUTE_QEMU = [
    cfg.StrOpt(
        "directory",
        default="/var/lib/amphora-driver/machines",
        help="Directory with one folder for each amphora: its disk, its config drive and what its console said.",
    ),
    cfg.StrOpt("prefix", default="amp", help="Which amphorae of that directory are this deployment's."),
    cfg.StrOpt("management_network", default="management", help="Id of the network the agents are reached on."),
    cfg.StrOpt(
        "image_directory",
        default="/var/lib/amphora-driver/images",
        help="Directory of the images: TAG.qcow2 for each tag. Where TAG.kernel lies beside it, that kernel is booted "
        "with TAG.initrd and the arguments in TAG.arguments; otherwise the image's own boot loader. An image is "
        "replaced by renaming another one over it: amphorae keep the one they were booted from.",
    ),
    cfg.StrOpt("image_tag", default="amphora", help="Tag of the image for load balancers whose flavor names none."),
    cfg.IntOpt("processors", default=1, min=1, max=64, help="Processors of an amphora."),
    cfg.IntOpt("memory", default=512, min=128, help="Memory of an amphora in MiB."),
    cfg.StrOpt(
        "user",
        default="nobody",
        help="The user that qemu runs as once it has opened what it needs; it owns no file and no group. A user of the "
        "amphorae's own keeps other processes of `nobody` away from them.",
    ),
    cfg.StrOpt("program", default="qemu-system-x86_64", help="The qemu that amphorae run in."),
    cfg.StrOpt(
        "machine", default="pc", help="qemu's type of machine; one whose PCI bus takes interfaces while it runs."
    ),
    cfg.StrOpt(
        "accelerator",
        default="auto",
        choices=["auto", "kvm", "tcg"],
        help="Whether the processor runs the amphorae (kvm) or qemu does (tcg, some twenty times slower). auto tries.",
    ),
]
