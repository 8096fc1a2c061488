# SPDX-License-Identifier: Apache-2.0
"""pyroute2 without the modules that the agent does not use.

`import pyroute2` loads every protocol: 140 modules more than the agent uses, and five megabytes of memory. The classes
are pyroute2's own, and the same process can still import the whole package.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import Any

_PACKAGE = "pyroute2"


def _install_lazy_package(spec: ModuleSpec) -> None:
    """Install a stand-in for the package that loads the real one when a name of its own is needed."""
    package = module_from_spec(spec)

    def __getattr__(name: str) -> Any:  # noqa: N807 (PEP 562 defines this name)
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if find_spec(f"{_PACKAGE}.{name}") is not None:
            return importlib.import_module(f"{_PACKAGE}.{name}")
        if package.__dict__.pop("__getattr__", None) is not None and spec.loader is not None:
            spec.loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = __getattr__
    sys.modules[_PACKAGE] = package


if _PACKAGE not in sys.modules and (_found := find_spec(_PACKAGE)) is not None:
    _install_lazy_package(_found)

from pyroute2.iproute.linux import IPRoute  # noqa: E402 (after the stand-in is installed)
from pyroute2.netlink.exceptions import NetlinkError  # noqa: E402

__all__ = ["IPRoute", "NetlinkError"]
