#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""gRPC's official interop cases between our transports and Debian's grpcio. scripts/interop-grpc asks other peers the same."""

import os
import sys

sys.path.insert(0, os.path.join(os.environ["TOP"], "tests", "interop", "grpc"))
import judge  # noqa: E402

OURS = os.path.join(os.environ["KVRELAY_BIN"], "tests", "interop_")
PEER = "/usr/bin/python3", os.path.join(judge.FOLDER, "peer.py")


def main():
    with judge.Server("our server", OURS + "server") as server:
        judge.cases("grpcio's client", *PEER, "client", server.address, without=server.impossible())
        judge.cases("our client and our server", OURS + "client", server.address)
        counts = server.ask("counts")
        judge.say(counts[1] == "0", "no call stays open", counts)
    judge.say(server.process.returncode == 0, "our server ends in order", server.process.returncode)
    with judge.Server("grpcio's server", *PEER, "server") as server:
        judge.cases("our client", OURS + "client", server.address)
    sys.exit(judge.failed != 0)


main()
