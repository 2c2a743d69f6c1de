# SPDX-License-Identifier: Apache-2.0
"""A Dynamo deployment on loopback: its relay, scripted workers, and what discovery says of them as a file for kvrelayd."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "e2e"))
from support.engine import Engine  # noqa: E402

import zmq  # noqa: E402

PYTHON = os.environ["DYNAMO_PYTHON"]
DC = "dc-a"
EXPECTED_BLOCKS = 1000

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 3, "eos_token_id": 2, "bos_token_id": 1}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"},
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class SharedEngine(Engine):
    """An engine that both sides listen to; it shows every subscription, not the first alone."""

    def __init__(self, endpoint):
        super().__init__(endpoint)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)


def engines(count):
    """One for each rank, on ports that follow each other."""
    for _ in range(20):
        opened, port = [], free_port()
        try:
            for rank in range(count):
                opened.append(SharedEngine(f"tcp://127.0.0.1:{port + rank}"))
            return opened
        except zmq.ZMQError:
            for engine in opened:
                engine.close()
    raise RuntimeError("no free ports in a row")


class Process:
    """A program with a log of its own, in a process group that ends with it."""

    def __init__(self, log, command, env, **pipes):
        self.log = open(log, "ab")  # noqa: SIM115 - as long as the program
        self.process = subprocess.Popen(command, env=env, stderr=self.log, start_new_session=True, **pipes)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.log.close()


class Worker(Process):
    """worker.py with a specification; its replies say when a command is done."""

    def __init__(self, spec, log, env):
        self.spec = spec
        command = [PYTHON, os.path.join(HERE, "worker.py"), json.dumps(spec)]
        super().__init__(log, command, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.id = int(self.reply(60)["worker"])

    def reply(self, timeout_s=30):
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise RuntimeError(f"{self.spec['endpoint']} does not answer")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.spec['endpoint']} has ended")
        return json.loads(line)

    def do(self, what, **more):
        self.process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        self.process.stdin.flush()
        return self.reply()


class ReportedLoad(Process):
    """Our pools of a configuration, with what workers report."""

    def __init__(self, text, log):
        path = log + ".yaml"
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        command = [os.path.join(os.environ["KVRELAY_BUILD"], "tests", "reported_load"), path]
        super().__init__(log, command, None, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.address = self.line().split()[1]

    def line(self, timeout_s=30):
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise RuntimeError("reported_load does not answer")
        return self.process.stdout.readline().decode()

    def report(self, *words):
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()
        answer = self.line()
        if answer != "ok\n":
            raise RuntimeError(f"{words}: {answer}")


class Deployment:
    """Everything of one run; use as a context."""

    def __init__(self, folder):
        self.folder = folder
        self.store = os.path.join(folder, "store")
        self.model = os.path.join(folder, "model")
        os.makedirs(self.store)
        os.makedirs(self.model)
        for name, content in (("config.json", CONFIG), ("tokenizer.json", TOKENIZER)):
            with open(os.path.join(self.model, name), "w", encoding="utf-8") as file:
                json.dump(content, file)
        host = dict.fromkeys(("DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"), "127.0.0.1")
        self.env = dict(
            {name: value for name, value in os.environ.items() if not name.startswith("DYN_")},
            **host,
            DYN_DISCOVERY_BACKEND="file",
            DYN_FILE_KV=self.store,
            DYN_REQUEST_PLANE="tcp",
            DYN_EVENT_PLANE="zmq",
            DYN_SELF_HOST_METADATA="0",
            HF_HUB_OFFLINE="1",
        )
        self.started = []
        self.workers = {}

    def log(self, name):
        return os.path.join(self.folder, name + ".log")

    def relay(self):
        """The real relay; its address."""
        address = f"127.0.0.1:{free_port()}"
        command = [PYTHON, "-m", "dynamo.kv_dc_relay", "--dc-id", DC, "--bind", address, "--watch-all"]
        command += ["--expected-unique-blocks", str(EXPECTED_BLOCKS)]
        log = open(self.log("relay"), "ab")  # noqa: SIM115
        self.started.append(Process(self.log("relay"), command, self.env, stdout=log))
        log.close()
        return address

    def add(self, name, **spec):
        spec.setdefault("path", self.model)
        worker = Worker(spec, self.log(name), self.env)
        self.started.append(worker)
        self.workers[name] = worker
        return worker

    def watch(self, name, address):
        """Our consumer follows the filters of a relay; returns the file of what it sees, a JSON object a line."""
        path = self.log(name)
        with open(path, "wb") as lines:
            command = [os.path.join(os.environ["KVRELAY_BIN"], "kvrelay"), "watch", address, "--json"]
            self.started.append(Process(path + ".err", command, None, stdout=lines))
        return path

    def reported_load(self):
        self.started.append(ReportedLoad(self.configuration(), self.log(f"load{len(self.started)}")))
        return self.started[-1]

    def stop(self, name):
        """Orderly: the worker takes its records back."""
        worker = self.workers.pop(name)
        worker.do("stop")
        worker.process.wait(20)

    def crash(self, name):
        """Its records stay until somebody finds them expired."""
        worker = self.workers.pop(name)
        worker.kill()
        return worker.id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            process.kill()

    # ---- discovery ----

    def records(self, bucket):
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(os.path.join(self.store, "v1", bucket)):
                if not name.startswith(".tmp_"):
                    with contextlib.suppress(FileNotFoundError), open(os.path.join(self.store, "v1", bucket, name), encoding="utf-8") as file:
                        found.append((urllib.parse.unquote(name), json.load(file)))
        return [record for _, record in sorted(found, key=lambda pair: pair[0])]

    def until_gone(self, worker, timeout_s=40):
        deadline = time.monotonic() + timeout_s
        while any(r["instance_id"] == worker for r in self.records("mdc") + self.records("instances")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"records of worker {worker} do not expire")
            time.sleep(0.2)

    def configuration(self):
        """What the records say, as kvrelayd is told it; JSON is YAML."""
        addresses = {w.id: w.spec["events"][0] for w in self.workers.values() if w.spec.get("events")}
        alive = {(r["namespace"], r["component"], r["endpoint"], r["instance_id"]) for r in self.records("instances")}
        endpoints, workers = {}, {}
        for record in self.records("mdc"):
            place = record["namespace"], record["component"], record["endpoint"]
            if not record.get("model_suffix"):
                endpoints.setdefault(place, endpoint_of(record))["workers"].append(worker_of(record, (*place, record["instance_id"]) in alive, addresses))
                workers[(*place, record["instance_id"])] = endpoints[place]["workers"][-1]
        for record in self.records("mdc"):
            place, card = (record["namespace"], record["component"], record["endpoint"]), record["card_json"]
            if record.get("model_suffix"):
                adapter = {"id": card["display_name"], "runtime_name": card["lora"]["name"], "aliases": card.get("aliases", [])}
                if adapter not in endpoints[place]["adapters"]:
                    endpoints[place]["adapters"].append(adapter)
                workers[(*place, record["instance_id"])]["adapters"].append(card["display_name"])
        relay = {"dc": DC, "bind": "127.0.0.1:0", "expected_unique_blocks": EXPECTED_BLOCKS}
        return json.dumps({"version": 1, "relay": relay, "endpoints": list(endpoints.values())}, indent=1)


def endpoint_of(record):
    card = record["card_json"]
    return {
        "namespace": record["namespace"],
        "component": record["component"],
        "endpoint": record["endpoint"],
        "model": card["display_name"],
        "aliases": card.get("aliases", []),
        "model_source": card.get("source_path") or card["display_name"],
        "block_size": card["kv_cache_block_size"],
        "hash_format": "eagle" if card["runtime_config"].get("enable_eagle") else "standard",
        "adapters": [],
        "workers": [],
    }


def worker_of(record, alive, addresses):
    card, runtime = record["card_json"], record["card_json"]["runtime_config"]
    worker = {
        "id": record["instance_id"],
        "role": card.get("worker_type") or "legacy",
        "rank_start": runtime.get("data_parallel_start_rank", 0),
        "ranks": runtime.get("data_parallel_size", 1),
        "total_kv_blocks": runtime.get("total_kv_blocks") or 0,
        "live": "yes" if alive else "no",
        "adapters": [],
    }
    if card.get("needs"):
        worker["needs"] = card["needs"]
    if record["instance_id"] in addresses:
        worker["events"] = {"type": "engine", "endpoint": addresses[record["instance_id"]]}
    return worker
