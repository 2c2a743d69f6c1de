# SPDX-License-Identifier: Apache-2.0
"""Runs judges: programs that print "ok - CASE" or "not ok - CASE: why", against servers that print "listening ADDRESS"."""

import os
import re
import select
import subprocess
import time

FOLDER = os.path.dirname(os.path.abspath(__file__))
LINE = re.compile(r"^(ok|not ok) - (.*)$")

passed = failed = 0


def say(good, name, detail=""):
    """One line per case; counted."""
    global passed, failed
    passed += bool(good)
    failed += not good
    print(f"ok - {name}" if good else f"not ok - {name}" + (f": {detail}" if detail else ""), flush=True)
    return good


def tail(text):
    return " | ".join(str(text).strip().splitlines()[-4:])[-600:]


class Server:
    """A server in a process of its own that ends with its standard input; use as a context. Its name begins its cases."""

    def __init__(self, name, *command, pattern=r"^listening (\S+)$", wait_s=30, **more):
        self.name, self.address = name, None
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)
        until = time.monotonic() + wait_s
        while self.address is None and select.select([self.process.stdout], [], [], max(0, until - time.monotonic()))[0]:
            line = self.process.stdout.readline()
            found = re.search(pattern, line)
            if found or not line:
                self.address = found and found[1]
                break
        if self.address is None:
            say(False, f"{name}: it listens")

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def ask(self, command):
        """The line that answers a command."""
        self.tell(command)
        return self.process.stdout.readline().split()[1:]

    def impossible(self):
        """What cases of ours begin with that it was built without."""
        return None if "gzip" in " ".join(self.ask("encodings")) else "client_compressed"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def take(name, text, status=0, without=None, errors=""):
    """Takes over the lines of a judge, but for cases that match `without`. One failure when there are no lines, or when it failed
    without naming one."""
    lines = [found for found in map(LINE.match, text.splitlines()) if found]
    silent = not lines or (status != 0 and all(found[1] == "ok" for found in lines))
    good = not silent
    for found in lines:
        if without is not None and re.match(without, found[2]):
            print(f"# {name}: {found[2]} left out")
        else:
            good &= say(found[1] == "ok", f"{name}: {found[2]}")
    if silent:
        say(False, f"{name}: it comes to its end", f"exit status {status}: {tail(text + errors)}")
    return good


def cases(name, *command, timeout_s=120, without=None, **more):
    """What a judge has to say, as `take`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        return say(False, f"{name}: it runs", error)
    return take(name, done.stdout, done.returncode, without, done.stderr)


def run(name, *command, timeout_s=120, expect=None, status=0, **more):
    """One case: the program ends with that status, and what it prints has `expect`, a pattern, in it. What it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(False, name, error)
        return ""
    text = done.stdout + done.stderr
    good = done.returncode == status and (expect is None or re.search(expect, text) is not None)
    say(good, name, f"exit status {done.returncode}: {tail(text)}")
    return text
