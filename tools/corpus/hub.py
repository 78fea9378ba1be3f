"""Failures of trackers, the hub and its caches; a hub that refuses is a server on this machine."""

from __future__ import annotations

from tools.corpus.capture import MADE, capture, caused, main

CLOSED = "http://127.0.0.1:9"
ONLINE = {
    "HF_HUB_OFFLINE": "0",
    "HF_ENDPOINT": CLOSED,
    "HF_HUB_DOWNLOAD_TIMEOUT": "3",
    "HF_HUB_ETAG_TIMEOUT": "3",
}


@caused(
    "wandb-unreachable", env={"WANDB_BASE_URL": CLOSED, "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "5"}
)
def wandb_unreachable():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", max_steps=4, report_to="wandb", use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("hub-unreachable", "snapshot", env=ONLINE)
def snapshot():
    from huggingface_hub import snapshot_download

    print(snapshot_download("HuggingFaceTB/SmolLM2-135M"))


@caused("hub-unreachable", "adapter")
def offline_adapter():
    import tiny
    from peft import PeftModel

    print(PeftModel.from_pretrained(tiny.model(), "someone/llama-lora"))


SERVER = """\
import http.server
import json
import sys

kind = sys.argv[1]


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if kind == "gated":
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("X-Error-Message", "Access to model meta-llama/Llama-3.1-8B is restricted.")
            self.end_headers()
        elif kind == "missing":
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
        elif kind == "broken":
            self.send_response(503)
            self.end_headers()
        else:
            self.send_response(200)
            self.send_header("ETag", '"0123"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(40_000_000))
            self.end_headers()
            if self.command == "GET":
                try:
                    self.wfile.write(bytes(40_000_000))
                except OSError:
                    pass

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", 29641), Hub).serve_forever()
"""
_SERVED = "python hub.py {} & hub=$!; sleep 1; {}; code=$?; kill $hub; exit $code"
_GATED = """\
from transformers import AutoModelForCausalLM

print(AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B"))
"""
_GATED_DATA = """\
from datasets import load_dataset

print(load_dataset("someone/private-talks"))
"""
_FETCH = """\
from huggingface_hub import hf_hub_download

print(hf_hub_download("HuggingFaceTB/SmolLM2-135M", "model.safetensors"))
"""


def _served(name: str, failure: str, kind: str, script: str, command: str = "python train.py") -> None:
    """Register a script that asks a hub of its own, which answers as `kind`."""
    env = {**ONLINE, "HF_ENDPOINT": "http://127.0.0.1:29641", "HF_HUB_DISABLE_XET": "1"}

    def make() -> None:
        files = {"train.py": script, "hub.py": SERVER}
        capture(
            name,
            failure,
            _SERVED.format(kind, command),
            files=files,
            env=env,
            by="tools/corpus/hub.py:_served",
            limit=60,
        )

    MADE[name] = make


_served("hub-gated", "hub-gated", "gated", _GATED)
_served("hub-gated-data", "hub-gated", "gated", _GATED_DATA)
_served("hub-bad-path-missing", "hub-bad-path", "missing", _GATED)
_served("hub-bad-path-missing-data", "hub-bad-path", "missing", _GATED_DATA)
_served("hub-unreachable-503", "hub-unreachable", "broken", _FETCH)
_served(
    "cache-disk",
    "cache-disk",
    "large",
    _FETCH,
    "mkdir cache; mount -t tmpfs -o size=4m tmpfs cache; HF_HOME=$PWD/cache python train.py; code=$?; "
    "umount cache; (exit $code)",
)

if __name__ == "__main__":
    main()
