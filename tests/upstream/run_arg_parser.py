# SPDX-License-Identifier: MIT
"""Run upstream's test-arg-parser to its end, also where the internet can't be reached.

Its last part gets a page from the project's own web site. If that site can't be reached, the test runs again in a
network namespace of its own, in which that name is this machine and a small server answers.
Where no such namespace can be made either, everything before that part counts, and the test is skipped
(exit code 77; a failure under KVSPLIT_REQUIRE=1).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

HOST = "ggml.ai"
LAST = "test-arg-parser: test good URL"
DONE = "test-arg-parser: all tests OK"


class Page(BaseHTTPRequestHandler):
    """One page, and 404 for any other."""

    def do_GET(self) -> None:
        body = b"llama.cpp"
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_args: object) -> None:
        pass


def inside(program: str, hosts: str) -> int:
    """In the namespace: put the hosts file in place, serve, run."""
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = HTTPServer(("127.0.0.1", 80), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return subprocess.run([program]).returncode


def main() -> int:
    if sys.argv[1] == "--inside":
        return inside(sys.argv[2], sys.argv[3])
    program = sys.argv[1]
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    if done.returncode == 0 and DONE in done.stdout:
        return 0
    if LAST not in done.stdout:
        return done.returncode or 1
    reason = "no unshare, ip and mount here"
    if all(shutil.which(tool) for tool in ("unshare", "ip", "mount")):
        with tempfile.TemporaryDirectory() as folder:
            hosts = os.path.join(folder, "hosts")
            with open(hosts, "w", encoding="ascii") as f:
                f.write(f"127.0.0.1 localhost {HOST}\n")
            command = ["unshare", "--net", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
            if subprocess.run(command + ["true"], stderr=subprocess.DEVNULL).returncode == 0:
                print(f"{HOST} can't be reached: once more with a server on this machine", flush=True)
                again = [sys.executable, os.path.abspath(__file__), "--inside", program, hosts]
                return subprocess.run(command + again).returncode
        reason = "a network namespace can't be made here"
    print(f"skipped: {HOST} can't be reached and {reason}; every part before that one passed", flush=True)
    return 1 if os.environ.get("KVSPLIT_REQUIRE") == "1" else 77


if __name__ == "__main__":
    sys.exit(main())
