# SPDX-License-Identifier: Apache-2.0
"""Starts kvrelayd, talks to it, and says what came of each test."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

BIN = os.environ["KVRELAY_BIN"]
BUILD = os.environ["KVRELAY_BUILD"]
sys.path.insert(0, os.path.join(BUILD, "tests", "python"))

failures = 0


def check(name, good, detail=""):
    """One line per test, counted by the runner."""
    global failures
    if good:
        print(f"ok - {name}")
    else:
        failures += 1
        print(f"not ok - {name}" + (f": {detail}" if detail != "" else ""))
    sys.stdout.flush()
    return good


def finish():
    sys.exit(1 if failures else 0)


def pool_yaml(events, model="llama", block_size=32, hash_format="standard", adapters=(), extra=""):
    """A configuration with one endpoint; `events` is a list of (worker id, first rank, ranks, lines of `events`)."""
    lines = ["version: 1", "relay:", "  dc: dc-a", "  bind: 127.0.0.1:0", "  expected_unique_blocks: 1000", "endpoints:"]
    lines += ["  - namespace: prod", "    component: backend", "    endpoint: generate", f"    model: {model}", "    aliases: [chat]"]
    lines += [f"    block_size: {block_size}", f"    hash_format: {hash_format}"]
    if adapters:
        lines += ["    adapters:"]
        lines += [f"      - id: {model}-{a}\n        runtime_name: {a}" for a in adapters]
    lines += ["    workers:"]
    for worker, rank, ranks, more in events:
        lines += [f"      - id: {worker}", f"        rank_start: {rank}", f"        ranks: {ranks}"]
        if adapters:
            lines += ["        adapters: [" + ", ".join(f"{model}-{a}" for a in adapters) + "]"]
        lines += ["        events:"] + [f"          {line}" for line in more]
    return "\n".join(lines) + "\n" + extra


class Daemon:
    """A running kvrelayd; use as a context."""

    def __init__(self, yaml, *arguments):
        self.folder = tempfile.TemporaryDirectory(prefix="kvrelayd-")
        self.config = os.path.join(self.folder.name, "kvrelayd.yaml")
        with open(self.config, "w", encoding="utf-8") as file:
            file.write(yaml)
        self.lines = []
        self.changed = threading.Condition()
        self.process = subprocess.Popen(
            [os.path.join(BIN, "kvrelayd"), "--config", self.config, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stderr:
            with self.changed:
                self.lines.append(line.rstrip("\n"))
                self.changed.notify_all()
        with self.changed:
            self.lines.append("")
            self.changed.notify_all()

    def wait_for(self, pattern, timeout_s=30.0, after=0):
        """The first log line that matches, of those after the first so many; or an exception with the whole log."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while True:
                for line in self.lines[after:]:
                    match = re.search(pattern, line)
                    if match:
                        return match
                left = deadline - time.monotonic()
                if left <= 0 or self.process.poll() is not None and self.lines[-1:] == [""]:
                    raise RuntimeError(f"no log line like {pattern!r}:\n" + "\n".join(self.lines))
                self.changed.wait(left)

    @property
    def address(self):
        return self.wait_for(r"event=listening .*address=(\S+)").group(1)

    def alive(self):
        return self.process.poll() is None

    def stop(self):
        """TERM, and the exit code."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "had to be killed"

    def __enter__(self):
        self.wait_for(r"event=ready")
        return self

    def __exit__(self, *_):
        code = self.stop()
        self.folder.cleanup()
        if code != 0:
            check("kvrelayd stops in order", False, f"exit code {code}\n" + "\n".join(self.lines[-40:]))


def kvrelay(*arguments, stdin=None, timeout_s=60):
    """Runs the tool: exit code, standard output, standard error."""
    done = subprocess.run(
        [os.path.join(BIN, "kvrelay"), *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stdout, done.stderr
