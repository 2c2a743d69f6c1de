# SPDX-License-Identifier: Apache-2.0
"""Certificates that a run makes for itself."""

import os
import subprocess


def make(folder, name, issuer=None, names="", ca=False):
    """NAME.pem and NAME.key in the folder, issued by ISSUER or by itself; `names` as "IP:127.0.0.1,DNS:localhost"."""

    def path(file):
        return os.path.join(folder, file)

    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "9"]
    command += ["-keyout", path(name + ".key"), "-out", path(name + ".pem"), "-subj", "/CN=" + name]
    command += ["-addext", "basicConstraints=critical,CA:" + ("TRUE" if ca else "FALSE")] if issuer else []
    command += ["-addext", "subjectAltName=" + names] if names else []
    command += ["-CA", path(issuer + ".pem"), "-CAkey", path(issuer + ".key")] if issuer else []
    subprocess.run(command, check=True, capture_output=True)
