# SPDX-License-Identifier: Apache-2.0
"""A scripted worker of a Dynamo deployment; runs in the interpreter that has the bindings.

Its one argument is a JSON object: endpoint, model, path, block_size, role, model_type, and optionally needs, aliases,
ranks, rank_start, total_kv_blocks, eagle, and events (the ZeroMQ address of each rank's engine). Without events it
publishes none. It answers each command, a JSON line on standard input, with a JSON line on standard output:

    {"do": "adapter", "name": N}    carries the adapter N
    {"do": "drop", "name": N}       no longer
    {"do": "load", "rank": R, "used": U}
    {"do": "stop"}                  orderly end, also at the end of the input
"""

import asyncio
import json
import os
import sys

from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerMetricsPublisher, WorkerType
from dynamo.llm import register_model, unregister_model
from dynamo.runtime import DistributedRuntime


def role(name):
    return getattr(WorkerType, name.capitalize())


def model_type(names):
    kinds = [getattr(ModelType, name) for name in names]
    all_of_them = kinds[0]
    for kind in kinds[1:]:
        all_of_them = all_of_them | kind
    return all_of_them


async def refuse(_request):
    """No request ever comes: who is there is all that counts."""
    yield {}


class Worker:
    def __init__(self, spec, runtime):
        self.spec, self.runtime = spec, runtime
        self.endpoint = runtime.endpoint(spec["endpoint"])
        self.publishers = []
        self.metrics = WorkerMetricsPublisher()
        self.config = ModelRuntimeConfig()
        self.config.data_parallel_start_rank = spec.get("rank_start", 0)
        self.config.data_parallel_size = spec.get("ranks", 1)
        if "total_kv_blocks" in spec:
            self.config.total_kv_blocks = spec["total_kv_blocks"]
        self.config.enable_eagle = spec.get("eagle", False)

    async def register(self, **more):
        spec = self.spec
        await register_model(
            ModelInput.Tokens,
            model_type(spec["model_type"]),
            self.endpoint,
            spec["path"],
            more.get("lora_name", spec["model"]),
            worker_type=role(spec["role"]),
            kv_cache_block_size=spec["block_size"],
            runtime_config=self.config,
            needs=[[role(name) for name in group] for group in spec.get("needs", [])],
            model_aliases=[] if more else spec.get("aliases", []),
            **more,
        )

    async def start(self):
        self.served = asyncio.ensure_future(self.endpoint.serve_endpoint(refuse, graceful_shutdown=False))
        await self.metrics.create_endpoint(self.endpoint)
        for rank, address in enumerate(self.spec.get("events", []), self.spec.get("rank_start", 0)):
            self.publishers.append(
                KvEventPublisher(
                    self.endpoint,
                    kv_block_size=self.spec["block_size"],
                    dp_rank=rank,
                    enable_local_indexer=True,
                    zmq_endpoint=address,
                )
            )
        await self.register()
        return {"worker": str(self.endpoint.connection_id())}

    async def obey(self, command):
        if command["do"] == "adapter":
            await self.register(lora_name=command["name"], base_model_path=self.spec["path"])
        elif command["do"] == "drop":
            await unregister_model(self.endpoint, lora_name=command["name"])
        elif command["do"] == "load":
            self.metrics.publish(dp_rank=command["rank"], kv_used_blocks=command["used"])
        else:
            raise ValueError(command["do"])
        return {}


async def main():
    runtime = DistributedRuntime(
        asyncio.get_running_loop(), os.environ["DYN_DISCOVERY_BACKEND"], os.environ["DYN_REQUEST_PLANE"]
    )
    worker = Worker(json.loads(sys.argv[1]), runtime)
    print(json.dumps(await worker.start()), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command = json.loads(line)
        if command["do"] == "stop":
            break
        print(json.dumps(await worker.obey(command)), flush=True)
    await unregister_model(worker.endpoint)
    runtime.shutdown()
    await asyncio.wait([worker.served], timeout=5)
    print("{}", flush=True)
    os._exit(0)


asyncio.run(main())
