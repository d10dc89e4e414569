# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI's completions whose every answer is scripted, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading

from aiohttp import web


class ScriptedServer:
    """`behave(number)` says what the n-th request gets: "ok", "500", "dead", "cut", "short" or "error".

    "dead" is a 500 that comes once every answer under way has ended.
    The server notes when requests came and when their answers ended, by the prompt's first token.
    """

    def __init__(self, behave=lambda _: "ok"):
        self.requests = []
        self.num_queried = 0
        self._num_streaming = 0
        self._behave = behave
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self):
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _models(self, _):
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _metrics(self, _):
        lines = [
            "# TYPE vllm:prefix_cache_queries counter",
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.num_queried}',
            "# TYPE vllm:prefix_cache_hits counter",
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.num_queried // 4}',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _complete(self, request):
        body = await request.json()
        what = self._behave(len(self.requests))
        self.requests.append(body)
        self.num_queried += len(body["prompt"])
        while what == "dead" and self._num_streaming:
            await asyncio.sleep(0.002)
        if what in ("500", "dead"):
            return web.Response(status=500, text="the engine is dead")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._num_streaming += 1
        try:
            return await self._stream(request, response, body, what)
        finally:
            self._num_streaming -= 1

    async def _stream(self, request, response, body, what):
        await response.prepare(request)
        num_tokens = body["max_tokens"] - (what == "short")
        for index in range(num_tokens):
            await self._send(response, {"choices": [{"index": 0, "text": "a"}]})
            await asyncio.sleep(0.002)
            if index == 1 and what == "cut":
                request.transport.close()
                return response
            if index == 1 and what == "error":
                await self._send(response, {"error": {"message": "out of luck", "code": 500}})
                await response.write(b"data: [DONE]\n\n")
                return response
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response, event):
        await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
