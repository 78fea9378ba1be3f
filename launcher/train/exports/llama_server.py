"""llama.cpp's server from the package xllamacpp, with the arguments of llama-server that an export uses."""

from __future__ import annotations

import argparse
import threading


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, required=True)
    given = parser.parse_args()
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.port, settings.n_ctx = given.model, given.port, given.ctx_size
    settings.n_parallel, settings.warmup = 1, False
    server = xllamacpp.Server(settings)
    assert server.listening_address.endswith(f":{given.port}")
    threading.Event().wait()


if __name__ == "__main__":
    main()
