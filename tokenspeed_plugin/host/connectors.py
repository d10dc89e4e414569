# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connectors under the tokenspeed scheduler: one row for each that vLLM registers.

A connector that cannot be run where this project is tested is supported only when reading it shows that it needs nothing beyond the
connector interface. A class given by `kv_connector_module_path` is taken as it is. `docs/compatibility.md` has this table, and a test
compares it with vLLM's registry.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Connector:
    """One connector of vLLM's registry.

    Attributes:
        name: in `kv_transfer_config.kv_connector`.
        why: why it is supported though it was not run, or refused; empty when a test runs it.
        is_supported: whether the tokenspeed scheduler takes it.
    """

    name: str
    why: str
    is_supported: bool = True


_PACKAGE = "its scheduler side is in a package of its own that could not be read or run here"
_INTERFACE = "not run here; it needs only what the connector interface says"

# fmt: off
CONNECTORS: tuple[Connector, ...] = (
    Connector("ExampleConnector", ""),
    Connector("OffloadingConnector", ""),
    Connector("MooncakeStoreConnector", "run by hand on CPU with a real master and store (0.3.13): see Mooncake by hand; CI lacks its library"),
    Connector("MultiConnector", "as far as each of its connectors is supported; it passes every call on"),
    Connector("DecodeBenchConnector", _INTERFACE),
    Connector("MooncakeConnector", _INTERFACE),
    Connector("NixlConnector", _INTERFACE),
    Connector("NixlPullConnector", _INTERFACE),
    Connector("NixlPushConnector", _INTERFACE),
    Connector("SimpleCPUOffloadConnector", "reads the free queue and the hashes of vLLM's own block pool", is_supported=False),
    Connector("HiSparseConnector", "works inside vLLM's own KV cache manager", is_supported=False),
    Connector("ExampleHiddenStatesConnector", "needs a KV cache group of hidden states", is_supported=False),
    Connector("MoRIIOConnector", "for AMD GPUs, which this project cannot run", is_supported=False),
    Connector("LMCacheConnectorV1", _PACKAGE, is_supported=False),
    Connector("LMCacheMPConnector", _PACKAGE, is_supported=False),
    Connector("FlexKVConnectorV1", _PACKAGE, is_supported=False),
    Connector("HF3FSKVConnector", "its file system client could not be run here", is_supported=False),
)
# fmt: on
_REFUSED = frozenset(row.name for row in CONNECTORS if not row.is_supported)


def is_refused(name: Any) -> bool:
    """Whether this name is one of vLLM's connectors that the tokenspeed scheduler does not take."""
    return name in _REFUSED


def has_refused_child(extra_config: Any) -> bool:
    """Whether one of the connectors of a MultiConnector is refused.

    Args:
        extra_config: `kv_transfer_config.kv_connector_extra_config`.
    """
    children = extra_config.get("connectors", ()) if isinstance(extra_config, dict) else ()
    return any(isinstance(child, dict) and is_refused(child.get("kv_connector")) for child in children)
