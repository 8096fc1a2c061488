# SPDX-License-Identifier: Apache-2.0
"""nova-compute with the virt driver of `plugins/nova_virt`. Runs in the environment of the services.

Nova loads virt drivers only from its package nova.virt.
"""

import sys
from pathlib import Path

import nova.virt
from nova.cmd import compute

nova.virt.__path__.append(str(Path(__file__).parent / "plugins/nova_virt"))
sys.argv[0] = "nova-compute"
compute.main()
