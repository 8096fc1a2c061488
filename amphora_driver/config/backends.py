# SPDX-License-Identifier: Apache-2.0
"""Options of the backends: the groups whose names begin with [amp_compute] or [amp_network].

Invariant: this module holds the options of all backends. octavia-api reads the same file and imports no backend.
"""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_compute": {
        cfg.StrOpt("driver", default="netns"): (
            "Compute backend of new load balancers whose flavor does not name one. A name of the entry point group "
            "amphora_driver.compute."
        ),
        cfg.ListOpt("enabled_drivers", default=[]): (
            "Further compute backends, separated by commas: those that flavors may name, and those of existing load "
            "balancers. The default is none."
        ),
        cfg.StrOpt("placement", default="preferred", choices=["none", "preferred", "required"]): (
            "Whether the amphorae of a load balancer run on different hypervisors. preferred: if possible. required: a "
            "load balancer has the provisioning status ERROR otherwise. none: no difference is made. The value applies "
            "to warm spares too."
        ),
        cfg.FloatOpt("boot_rate", default=0.0, min=0.0, max=1000.0): (
            "Largest average number of boots per second of one controller process. Boots of fail-overs precede those "
            "of new load balancers. 0 to 1000; 0 means no limit."
        ),
        cfg.IntOpt("boot_burst", default=10, min=1, max=10000): (
            "Number of boots that may start at once after a pause, if boot_rate is set. 1 to 10000."
        ),
    },
    "amp_compute_netns": {
        cfg.StrOpt("directory", default="/var/lib/amphora-driver/amphorae"): (
            "Directory with one subdirectory per amphora: its /etc, /var/lib and log."
        ),
        cfg.StrOpt("prefix", default="amp"): "First part of the names of network namespaces. At most 6 characters.",
        cfg.StrOpt("agent_python", default="/opt/amphora-agent/bin/python"): (
            "Python interpreter of the environment in which the agent is installed."
        ),
        cfg.StrOpt("management_network", default="management"): (
            "Id of the network through which the controller reaches the agents."
        ),
    },
    "amp_compute_qemu": {
        cfg.StrOpt("directory", default="/var/lib/amphora-driver/machines"): (
            "Directory with one subdirectory per amphora: its disk, its config drive and its console log."
        ),
        cfg.StrOpt("prefix", default="amp"): (
            "Name of this deployment. The backend touches only the amphorae of the directory that have this name."
        ),
        cfg.StrOpt("management_network", default="management"): (
            "Id of the network through which the controller reaches the agents."
        ),
        cfg.StrOpt("image_directory", default="/var/lib/amphora-driver/images"): (
            "Directory of the images, one TAG.qcow2 per tag. With a file TAG.kernel beside it, qemu boots that kernel "
            "with TAG.initrd and the arguments in TAG.arguments; without it, the boot loader of the image. To replace "
            "an image, rename the new file over it: running amphorae keep the old file."
        ),
        cfg.StrOpt("image_tag", default="amphora"): (
            "Tag of the image for load balancers whose flavor does not name one."
        ),
        cfg.IntOpt("processors", default=1, min=1, max=64): "Number of virtual processors of an amphora. 1 to 64.",
        cfg.IntOpt("memory", default=512, min=128): "Memory of an amphora in MiB. At least 128.",
        cfg.StrOpt("user", default="nobody"): (
            "System user of the qemu process after it has opened its files. The user must own no file and belong to no "
            "group. A user for the amphorae alone isolates them from other processes of the default user."
        ),
        cfg.StrOpt("program", default="qemu-system-x86_64"): "Name or path of the qemu program.",
        cfg.StrOpt("machine", default="pc"): (
            "Machine type of qemu. Its PCI bus must support hot-plug of network interfaces."
        ),
        cfg.StrOpt("accelerator", default="auto", choices=["auto", "kvm", "tcg"]): (
            "How amphorae execute. kvm: hardware virtualization. tcg: emulation, about twenty times slower. auto: kvm "
            "if the host supports it, otherwise tcg."
        ),
    },
    "amp_network": {
        cfg.StrOpt("driver", default="local"): (
            "Network backend of new load balancers, for their VIPs and ports. A name of the entry point group "
            "amphora_driver.network."
        ),
        cfg.ListOpt("enabled_drivers", default=[]): (
            "Further network backends of existing load balancers, separated by commas. The default is none."
        ),
        cfg.FloatOpt("vip_timeout", default=300.0, min=0.0): (
            "Time limit in seconds for the network backend to allocate the VIP addresses of a load balancer. After it "
            "the load balancer has the provisioning status ERROR; retries continue. 0 or more."
        ),
    },
    "amp_network_local": {
        cfg.StrOpt("switch", default="amp-switch"): "Network namespace that holds the bridges of all networks."
    },
}
