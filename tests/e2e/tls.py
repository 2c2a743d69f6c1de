#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""TLS and mutual TLS between kvrelayd, kvrelay and programs of others: grpcio on either side, curl, openssl s_client."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent import futures

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from support.daemon import BIN, Daemon, check, finish, pool_yaml  # noqa: E402

import grpc  # noqa: E402
import kvrelay_pb2 as pb  # noqa: E402
from support import certs  # noqa: E402
from support.messages import RELAY  # noqa: E402

INFO = "/dynamo.kvrelay.v1.KvEventRelay/GetRelayInfo"
MARKER = 1263948337
ROUTER = "spiffe://example/router"
folder = tempfile.TemporaryDirectory(prefix="kvrelay-tls-")


def path(name):
    return os.path.join(folder.name, name)


def read(name):
    with open(path(name), "rb") as file:
        return file.read()


def make(name, *arguments, **more):
    certs.make(folder.name, name, *arguments, **more)


def configuration(mutual, allow=()):
    tls = ["  tls:", f"    cert: {path('server.pem')}", f"    key: {path('server.key')}"]
    tls += [f"    client_ca: {path('ca.pem')}"] if mutual else []
    tls += [f"    allow: [{', '.join(allow)}]"] if allow else []
    return pool_yaml([(7, 0, 1, ["type: none"])]).replace("endpoints:", "\n".join(tls) + "\nendpoints:")


def kvrelay(address, *more):
    """Exit code and what it said of `kvrelay info`."""
    done = subprocess.run([os.path.join(BIN, "kvrelay"), "info", address, "--timeout", "3", *more], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def credentials(client=None):
    key, cert = (read(client + ".key"), read(client + ".pem")) if client else (None, None)
    return grpc.ssl_channel_credentials(read("ca.pem"), key, cert)


def ask(address, client=None):
    """What grpcio gets: the contract's marker, or the code of an error."""
    with grpc.secure_channel(address, credentials(client)) as channel:
        call = channel.unary_unary(INFO, pb.RelayInfoRequest.SerializeToString, pb.RelayInfo.FromString)
        try:
            return call(pb.RelayInfoRequest(contract_marker=MARKER), timeout=3).contract_marker
        except grpc.RpcError as error:
            return error.code()


def s_client(address, *more):
    done = subprocess.run(["openssl", "s_client", "-connect", address, "-CAfile", path("ca.pem"), *more], input="", capture_output=True, text=True)
    return done.stdout + done.stderr


TRUST = ["--tls-ca", path("ca.pem")]
SHOW = ["--tls-cert", path("client.pem"), "--tls-key", path("client.key")]


def server_only():
    with Daemon(configuration(mutual=False)) as daemon:
        address = daemon.address
        port = address.rsplit(":", 1)[1]
        check("S100 grpcio is served over TLS", ask(address) == MARKER, ask(address))
        code, said = kvrelay(address, *TRUST)
        check("C16 kvrelay is served over TLS", code == 0, said)
        ends = subprocess.run(["openssl", "x509", "-in", path("server.pem"), "-noout", "-enddate", "-dateopt", "iso_8601"], capture_output=True, text=True)
        ends = ends.stdout.strip().removeprefix("notAfter=").replace(" ", "T")
        check("C16 kvrelay says when the certificate ends", f"certificate  until {ends}\n" in said, f"{said} {ends}")
        code, said = kvrelay(address, "--tls")
        check("C16 the system's authorities do not know ours", code == 69 and "not trusted" in said, said)
        code, said = kvrelay(address, *TRUST, "--tls-server-name", "other.example")
        check("C16 another name is refused", code == 69 and "another host" in said, said)
        code, said = kvrelay("localhost:" + port, *TRUST)
        check("C16 a name of the certificate is as good as its address", code == 0, said)
        code, said = kvrelay(address)
        check("S28 kvrelay in plaintext is told", code == 69 and "TLS" in said, said)
        line = daemon.wait_for(r"event=connection_closed .*plaintext on a TLS port")
        check("S28 kvrelayd says so, too", line is not None)
        said = subprocess.run(
            ["curl", "-s", "--http2", "--cacert", path("ca.pem"), "-X", "POST", "-o", "/dev/null", "-w", "%{http_version} %{http_code}"]
            + ["-H", "content-type: application/grpc", f"https://{address}{INFO}"],
            capture_output=True,
            text=True,
        ).stdout
        check("S100 curl speaks HTTP/2 by ALPN", said == "2 200", said)
        said = s_client(address, "-alpn", "h2", "-tls1_3")
        check("S100 h2 is chosen", "ALPN protocol: h2" in said and "Verify return code: 0" in said, said)
        check("S101 TLS 1.2 with a good suite", "ALPN protocol: h2" in s_client(address, "-alpn", "h2", "-tls1_2"))
        said = s_client(address, "-alpn", "http/1.1")
        check("S100 no protocol in common", "no application protocol" in said, said)
        said = s_client(address, "-alpn", "h2", "-tls1_2", "-cipher", "AES128-SHA:@SECLEVEL=0")
        check("S101 no suite of RFC 9113's list", "handshake failure" in said, said)
        said = s_client(address, "-alpn", "h2", "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")
        check("S101 no TLS 1.1", "protocol version" in said, said)


def mutual():
    with Daemon(configuration(mutual=True, allow=[ROUTER, "dns:other.example"]), "--health-bind", "127.0.0.1:0") as daemon:
        address = daemon.wait_for(r"transport=grpc address=(\S+)").group(1)
        check("S102 grpcio shows its certificate", ask(address, "client") == MARKER, ask(address, "client"))
        check("S102 grpcio without one is refused", ask(address) == grpc.StatusCode.UNAVAILABLE)
        check("S102 a name that is not on the list is refused", ask(address, "nobody") == grpc.StatusCode.UNAVAILABLE)
        check("S102 another authority's is refused", ask(address, "stranger") == grpc.StatusCode.UNAVAILABLE)
        code, said = kvrelay(address, *TRUST, *SHOW)
        check("C16 kvrelay shows its certificate", code == 0, said)
        code, said = kvrelay(address, *TRUST)
        check("C16 kvrelay without one says why", code == 69 and "certificate required" in said, said)
        for text in ["shows no certificate", "none of the allowed names", "not trusted here"]:
            check(f"S102 the log says: {text}", daemon.wait_for(f"level=warn event=connection_closed .*{text}") is not None)
        probe = daemon.wait_for(r"transport=health address=(\S+)").group(1)
        with grpc.insecure_channel(probe) as channel:
            answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=3)
        check("S83 probes need no certificate", answer == b"\x08\x01", answer)


def one_port():
    """gRPC and raw frames on one port, in plaintext, over TLS and with certificates demanded; and TLS on a port for raw frames alone."""
    for what, tls, flags in (("plaintext", None, []), ("TLS", False, TRUST), ("mutual TLS", True, TRUST + SHOW)):
        yaml = pool_yaml([(7, 0, 1, ["type: none"])]) if tls is None else configuration(tls)
        with Daemon(yaml, "--raw-bind", "127.0.0.1:0") as daemon:
            address = daemon.wait_for(r"transport=grpc address=(\S+)").group(1)
            raw = daemon.wait_for(r"transport=raw address=(\S+)").group(1)
            check(f"B12 one address for both, {what}", raw == address, raw)
            for target in (address, "raw://" + address):
                code, said = kvrelay(target, *flags)
                check(f"B12 one port, {what}: {target.partition('://')[0][:3]}", code == 0 and ("certificate" in said) == (tls is not None), said)
            code, said = kvrelay("raw://" + address, *([] if flags else TRUST))
            check(f"B12 one port, {what}: raw frames the other way are refused", code == 69 and (not flags or "TLS" in said), said)
            if tls:
                code, said = kvrelay("raw://" + address, *TRUST)
                check("B12 one port: raw frames without a certificate are refused", code == 69 and "certificate required" in said, said)
            if tls is not None:
                check("B12 one port: h2 is preferred", "ALPN protocol: h2" in s_client(address, "-alpn", "kvrelay-raw/1,h2", *client_files(tls)))
                said = s_client(address, *client_files(tls))
                check("B12 one port: who names no protocol is refused", "no application protocol" in said, said)
    with Daemon(configuration(False), "--raw-bind", "127.0.0.1:00") as daemon:
        raw = daemon.wait_for(r"transport=raw address=(\S+)").group(1)
        check("B12 raw frames over TLS on a port of their own", kvrelay("raw://" + raw, *TRUST)[0] == 0)
        code, said = kvrelay(raw, *TRUST)
        check("B12 which gRPC is not served on", code == 69 and "no application protocol" in said, said)


def client_files(shown):
    return ["-cert", path("client.pem"), "-key", path("client.key")] if shown else []


class Relay(grpc.GenericRpcHandler):
    """A relay that only says who it is."""

    def service(self, details):
        if details.method != INFO:
            return None
        info = pb.RelayInfo(protocol_version=1, relay=RELAY, contract_marker=MARKER)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: info, pb.RelayInfoRequest.FromString, pb.RelayInfo.SerializeToString)


def grpcio_serves():
    for mutual_too in (False, True):
        server = grpc.server(futures.ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers((Relay(),))
        pair = [(read("server.key"), read("server.pem"))]
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, read("ca.pem") if mutual_too else None, mutual_too))
        server.start()
        code, said = kvrelay(f"127.0.0.1:{port}", *TRUST, *(SHOW if mutual_too else []))
        what = "mutual TLS" if mutual_too else "TLS"
        check(f"C16 kvrelay asks a grpcio server over {what}", code == 0, f"{code} {said}")
        if mutual_too:
            code, said = kvrelay(f"127.0.0.1:{port}", *TRUST)
            check("C16 grpcio wants a certificate", code == 69, f"{code} {said}")
        server.stop(0)


def reload():
    """HUP reads the files again: for handshakes, not for connections; those that cannot be used change nothing."""
    def replace(name):
        for end in (".pem", ".key"):
            shutil.copyfile(path(name + end), path("server" + end))

    with Daemon(configuration(mutual=False)) as daemon, \
            grpc.secure_channel(daemon.wait_for(r"transport=grpc address=(\S+)").group(1), credentials()) as kept:
        address = daemon.wait_for(r"transport=grpc address=(\S+)").group(1)
        old, new = TRUST, ["--tls-ca", path("other.pem")]
        call = kept.unary_unary(INFO, pb.RelayInfoRequest.SerializeToString, pb.RelayInfo.FromString)
        check("S103 before", call(pb.RelayInfoRequest(contract_marker=MARKER), timeout=3).contract_marker == MARKER)
        for name, text, served, refused in (("successor", "event=tls ", new, old), ("mixed", "event=tls_failed .*does not belong to", new, old),
                                            ("first", "event=tls ", old, new)):
            replace(name)
            before = len(daemon.lines)
            daemon.process.send_signal(signal.SIGHUP)
            check(f"S103 {name}: the log says so", daemon.wait_for(text, after=before) is not None)
            code, told = kvrelay(address, *served)
            check(f"S103 {name}: whom it serves", code == 0, told)
            code, told = kvrelay(address, *refused)
            check(f"S103 {name}: whom it does not", code == 69, told)
            again = call(pb.RelayInfoRequest(contract_marker=MARKER), timeout=3)
            check(f"S103 {name}: a connection that was there stays", again.contract_marker == MARKER)


def bad_configurations():
    def refused(name, yaml, text, *arguments):
        with open(path("bad.yaml"), "w", encoding="utf-8") as file:
            file.write(yaml)
        done = subprocess.run([os.path.join(BIN, "kvrelayd"), "--config", path("bad.yaml"), *arguments], capture_output=True, text=True, timeout=10)
        check(name, done.returncode == 78 and text in done.stderr, f"{done.returncode} {done.stderr}")

    good = configuration(mutual=True)
    refused("a key of another certificate", good.replace("server.key", "client.key"), "client.key does not belong to", "--check")
    refused("a file that is not there", good.replace("server.pem", "none.pem"), "none.pem: No such file or directory", "--check")
    refused("names without authorities", configuration(False, [ROUTER]), "relay.tls.allow: needs client_ca", "--check")


def main():
    make("ca", ca=True)
    make("other", ca=True)
    make("server", "ca", "IP:127.0.0.1,DNS:localhost")
    make("client", "ca", "URI:" + ROUTER)
    make("nobody", "ca", "URI:spiffe://example/nobody,DNS:nobody.example")
    make("stranger", "other", "URI:" + ROUTER)
    make("successor", "other", "IP:127.0.0.1,DNS:localhost")
    for end, of in ((".pem", "successor"), (".key", "client")):
        shutil.copyfile(path(of + end), path("mixed" + end))
        shutil.copyfile(path("server" + end), path("first" + end))
    server_only()
    mutual()
    one_port()
    reload()
    grpcio_serves()
    bad_configurations()
    folder.cleanup()
    finish()


main()
