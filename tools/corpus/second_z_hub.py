"""Second held-out logs of the hub, its cache and the trackers; the hub is a server on loopback."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import CLOCK, DOCKER, held, shell

MIRROR = """
import json, os, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONFIG = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
GATED = ("Access to {repo} is restricted and you are not in the authorized list. "
         "Visit https://huggingface.co/{repo} to ask for access.")


class Hub(BaseHTTPRequestHandler):
    gated = False
    weights = 4_000_000

    def log_message(self, *_):
        pass

    def answer(self, code, headers, size=0):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def do_HEAD(self):
        repo = "/".join(self.path.removeprefix("/api/models").removeprefix("/api/datasets").split("/")[1:3])
        if self.gated:
            message = GATED.format(repo=repo)
            self.answer(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": message})
        elif self.path.endswith("/config.json"):
            text = json.dumps(CONFIG).encode()
            self.answer(200, {"ETag": '"a1"', "X-Repo-Commit": "c" * 40}, len(text))
            self.command == "GET" and self.wfile.write(text)
        elif self.path.endswith(("model.safetensors", "train.jsonl")):
            self.answer(200, {"ETag": '"b2"', "X-Repo-Commit": "c" * 40}, self.weights)
            self.command == "GET" and self.wfile.write(b"0" * self.weights)
        else:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "c" * 40})

    do_GET = do_HEAD


def start(**settings):
    for name, value in settings.items():
        setattr(Hub, name, value)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
"""
ONLINE = {"HF_HUB_OFFLINE": "0"}


@held("hub-gated", "z2-model", env=ONLINE, files={"mirror.py": MIRROR})
def gated_model():
    import mirror

    mirror.start(gated=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B-Instruct")
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B-Instruct")
    print(len(tokenizer), model.num_parameters())


@shell(
    "hub-unreachable",
    "z2-pipeline",
    f"python train.py 2>&1 | {CLOCK}",
    env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
)
def mirror_is_down():
    from transformers import pipeline

    print(pipeline("fill-mask", model="google-bert/bert-base-uncased", device="cpu")("Paris is [MASK]."))


@held("hub-unreachable", "z2-dataset-offline", launcher="torchrun", ranks=2)
def dataset_offline():
    import torch.distributed as dist
    from datasets import load_dataset

    dist.init_process_group("gloo")
    print(f"[rank {dist.get_rank()}] loading data")
    data = load_dataset("tatsu-lab/alpaca", split="train[:1%]")
    print(len(data))


@shell("hub-bad-path", "z2-peft-adapter", f"python train.py 2>&1 | {DOCKER}")
def mistyped_adapter():
    import tiny
    from peft import PeftModel

    model = PeftModel.from_pretrained(tiny.model(), "outputs/lora/run 7/checkpoint-500")
    model.print_trainable_parameters()


@shell(
    "cache-disk",
    "z2-weights",
    env=ONLINE,
    files={"mirror.py": MIRROR},
    command=(
        "unshare -m bash -c 'mkdir -p ~/.cache && mount -t tmpfs -o size=1m none ~/.cache; python train.py'"
        " 2>&1"
    ),
)
def weights_do_not_fit():
    import mirror

    mirror.start(weights=4_000_000)
    from transformers import AutoModelForCausalLM

    print(AutoModelForCausalLM.from_pretrained("acme/gpt2-tiny").num_parameters())


@held("wandb-login", "z2-trainer-ranks", launcher="torchrun", ranks=2)
def no_key_in_one_rank():
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    data = [{"input_ids": [4, 5, 6, 7], "label": i % 2} for i in range(32)]
    args = TrainingArguments("bert", use_cpu=True, max_steps=2, report_to=["wandb"], run_name="bert-tiny")
    Trainer(model, args, train_dataset=data).train()


@held("report-to-unknown", "z2-typo-ranks", launcher="torchrun", ranks=2)
def tracker_typo():
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )
    data = [{"input_ids": [4] * 8, "labels": [5] * 4} for i in range(16)]
    args = Seq2SeqTrainingArguments("t5", use_cpu=True, report_to="tensorbord", max_steps=2)
    Seq2SeqTrainer(model, args, train_dataset=data).train()


if __name__ == "__main__":
    main()
