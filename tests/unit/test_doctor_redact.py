"""What `doctor --bundle` takes out of its report, and what it leaves."""

from __future__ import annotations

import pytest
from every import every

from launcher.knowledge.doctor.redact import Private, redact, redact_json

PRIVATE = Private(
    homes=("/home/alice",), users=("alice",), hosts=("gpu-box-7", "gpu-box-7.corp.example"),
    secrets=("correct horse",),
)  # fmt: skip


@every(
    "text",
    [
        "hf_abcdefghijklmnop",
        "token=hf_ABCDEFGH12345678",
        "wandb 0123456789abcdef0123456789abcdef01234567",
        "WANDB_API_KEY: local-0123",
        '"password": "swordfish"',
        "http://alice:swordfish@proxy:3128",
        "pass phrase correct horse battery",
        "/home/alice/runs",
        "/scratch/alice_data",
        "Alice",
        "gpu-box-7.corp.example",
        "on GPU-BOX-7",
        "10.20.30.40",
        "10.20.30.40:29500",
        "fe80::1ff:fe23:4567:890a",
        "[2001:db8::1]:443",
        "02:42:ac:11:00:02",
        "GPU-8f2b6d1e-1111-2222-3333-444455556666",
        "bob@example.org",
        "Authorization: Bearer abcdefghijkl",
        "ghp_abcdefghijklmnopqrst",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.sig",
        "postgres://u:sword@fish/swordfish@db/x",
        "postgres://fish/swordfish@db/x",
        "https://hub.example/x?a=b&sig=swordfish&X-Amz-Signature=swordfish",
        "Basic YWJjZGVmZ2hpag==abcdefghij",
        "/home/bob/lib:/nas/users/bob",
        "/Users/Bob/x",
        "passphrase: swordfish",
    ],
)
def test_what_is_private_goes(text):
    kept = redact(text, PRIVATE).lower()
    for private in (
        "hf_a", "0123", "swordfish", "horse", "alice", "gpu-box", "20.30", "ff:fe", "db8", "42:ac", "8f2b",
        "bob", "abcdefghij", "eyjh", "fish/",
    ):  # fmt: skip
        assert private not in kept, kept
    assert "<" in kept or "~" in kept


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.13.0+cpu, CUDA 12.8",
        "driver 570.86.15",
        "02:33:15",
        "std::vector",
        "8x NVIDIA A100-SXM4-80GB (80.0 GiB, sm_80)",
        "cpu_adam, fused_adam",
        "29500 is free",
        "TOKENIZERS_PARALLELISM false",
        "/data/bobalice",
        "HF_TOKEN=(set)",
    ],
)
def test_what_is_needed_stays(text):
    assert redact(text, PRIVATE) == text


def test_a_home_of_another_user_whose_name_begins_alike_is_no_tilde():
    assert redact("/home/alice2/x", PRIVATE) == "/home/<user>/x"


def test_json_is_redacted_in_keys_and_depth():
    value = {"alice": [{"path": "/home/alice/x"}, 3, None, True], "n": ("10.0.0.1",)}
    assert redact_json(value, PRIVATE) == {"<user>": [{"path": "~/x"}, 3, None, True], "n": ["<address>"]}


def test_the_name_of_a_key_tells_that_its_value_is_a_secret():
    value = {
        "HF_TOKEN": "(set)",
        "DS_PW": "short",
        "NCCL_AUTH": "a b",
        "api_key": 3,
        "WANDB_PASSPHRASE": "x y",
    }
    assert redact_json(value, PRIVATE) == {
        "HF_TOKEN": "(set)", "DS_PW": "<secret>", "NCCL_AUTH": "<secret>", "api_key": 3,
        "WANDB_PASSPHRASE": "<secret>",
    }  # fmt: skip
    kept = {"TOKENIZERS_PARALLELISM": "false", "hub_login": True, "path": "/data", "keys": "a", "author": "c"}
    assert redact_json(kept, PRIVATE) == kept


def test_nothing_private_changes_nothing():
    assert redact("alice", Private(users=("",), homes=("/",), secrets=("",))) == "alice"
