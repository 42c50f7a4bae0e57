"""A server that is not ours: takes a model and a port, loads for a moment, then answers /health and
/v1/models.

    python standin_vllm.py MODEL PORT [FAULT]

FAULT: `crashes` ends it with an error while it loads, `crashes-later` after it was seen to be
ready, `never-ready` keeps it loading, `loads-N` for N seconds; `version-N` answers /weights;
`other-program` knows no models; `ends-slowly` takes a second to end; `in-a-child` serves from a
child process that does not end with its parent. Each start appends the model's path to
$STANDIN_STARTS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main(model: str, port: str, fault: str = "") -> None:
    with Path(os.environ["STANDIN_STARTS"]).open("a") as starts:
        starts.write(f"{model}\n")
    if fault == "crashes":
        raise RuntimeError("not enough memory for the model")
    if fault == "in-a-child" and os.fork():
        os.wait()
        return
    if fault == "ends-slowly":
        signal.signal(signal.SIGTERM, lambda *_: threading.Timer(1.0, os._exit, (0,)).start())
    ready_at = time.monotonic() + float(
        fault.removeprefix("loads-") if fault.startswith("loads-") else 0.2
    )

    def crash() -> None:
        print("RuntimeError: an illegal memory access", flush=True)
        os._exit(9)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = self.path == "/health" or (
                time.monotonic() > ready_at and fault != "never-ready"
            )
            body = json.dumps({"data": [{"id": model}], "pid": os.getpid()}).encode()
            known = fault != "other-program" and (
                self.path != "/weights" or fault.startswith("version-")
            )
            if self.path == "/weights" and known:
                body = json.dumps({"weight_version": int(fault.removeprefix("version-"))}).encode()
            self.send_response(404 if not known else 200 if ready else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if fault == "crashes-later" and ready and self.path == "/v1/models":
                threading.Timer(0.4, crash).start()

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
