# SPDX-License-Identifier: Apache-2.0
"""`vllm.endpoint_plugins` entry point: the route that `tokenspeed-plugin kv-map` asks.

Guarded twice, as vLLM guards such routes: an endpoint plugin is loaded only when `VLLM_PLUGINS` names it, and the route is there only in
development mode (`VLLM_SERVER_DEV_MODE=1`), because it tells of every client's session.
"""

import time
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse

from tokenspeed_plugin.entry_points.general import PLUGIN_NAME
from tokenspeed_plugin.host.dev_mode import is_dev_mode
from tokenspeed_plugin.host.patches import KV_MAP_METHOD
from tokenspeed_plugin.kv_flat.kv_map import encoded, record

ROUTE = "/tokenspeed/kv_map"


class KvMapEndpoint:
    """The route, and the engine that it asks."""

    name = PLUGIN_NAME
    required_tasks: tuple[str, ...] | None = None

    def __init__(self) -> None:
        self._engine_client: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Adds the route in development mode, and nothing otherwise."""
        if is_dev_mode():
            app.add_api_route(ROUTE, self.kv_map, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002
        """Remembers the engine; a server that only renders has none."""
        self._engine_client = engine_client

    async def kv_map(self) -> JSONResponse:
        """A snapshot of the block pool of each engine."""
        core = getattr(self._engine_client, "engine_core", None)
        if core is None:
            raise HTTPException(404, "this server has no engine")
        try:
            maps = await core.call_utility_all_async(KV_MAP_METHOD)
        except Exception as error:
            raise HTTPException(404, f"no KV map: {error}") from error
        now_s = time.time()
        return JSONResponse(record([encoded(raw, now_s, engine) for engine, raw in enumerate(maps)]))
