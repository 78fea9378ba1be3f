"""Secrets are found by name, by shape and in every notation; what healthy logs print stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counted_work import LINEAR, cpu_growth
from every import every

from launcher.cli import main
from launcher.errors import Problem, RunFailed
from launcher.execute.run_dir import record_bound
from launcher.files.redaction import SECRET, hide_in, hider, line_hider, secret_values
from launcher.files.secrets import is_secret_name, looks_secret
from launcher.report.outcome import emit_error

PW = "s3cretVALUE99xyz"
SHAPES = [
    "ghp_" + "a1B2" * 9, "github_pat_" + "a1B2" * 9, "hf_" + "Zq" * 17, "glpat-" + "a1B2" * 5,
    "sk-" + "a1B2" * 9, "sk-proj-" + "a1B2" * 9, "AKIA" + "A1B2" * 4, "xoxb-1234567890-abc",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl", f"https://me:{PW}@host.org/x", f"postgres://u:{PW}@h/db",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
WRITTEN = [
    "PASSPHRASE=@", "NCCL_NET_PASS=@", "HF_TOKEN: @", "{'HF_TOKEN': '@'}", '{"api_key": "@"}',
    '"{\\"api_key\\": \\"@\\"}"',
    "api_key: @", "--token @", "--token=@", "['--token', '@']", "--api-key @", "Authorization: Bearer @",
    "'Authorization': 'Bearer @'", "authorization: Basic @", "x-api-key: @", "curl -H 'X-Auth-Token: @' u",
    "password=@", "AWS_SECRET_ACCESS_KEY=@", "Env(HF_TOKEN=@)", "f(token='abc@0000')",
    'os.environ["WANDB_API_KEY"] = "@"', "os.environ.setdefault('HF_TOKEN', '@')", "DB_PASSWORD=ab)@",
    "DB_PASSWORD=a&b;@,c]",
    '{"password": "abc\\"@"}', "https://b.s3.amazonaws.com/x?X-Amz-Signature=@&X-Amz-Date=2026",
    "https://hook.host/x?token=@", "https://hook.host/x?a=1&token=@&b=2",
    "https://a.blob.core.windows.net/x?sv=1&sig=@%2Fx&se=2", "Set-Cookie: session=@; Path=/",
]  # fmt: skip
KEPT = [
    "hf_transfer", "hf_transfer_enabled_by_default", "sk-learn", "sk-learn-pipeline-model-v2-final",
    "tokens: 123",
    "sha256:" + "ab12" * 16, "cache key: " + "ab12" * 16, "max_token=2048", "max_token=...",
    "pad_token='<pad>'",
    "eos_token: </s>", "KeyError: 'model.embed_tokens.weight'", "num_key_value_heads=8",
    "use_auth_token=True", "unexpected token: something", "image_token='<image>'",
    "key: model.layers.0.self_attn.q_proj.weight",
    "Missing key: 'model.layers.0.mlp.down_proj.lora_A.weight'",
    "sort_key='timestamp_2024_01_01_batch_7'",
    'unexpected key: "bert.encoder.layer.0.intermediate.dense.weight"',
    "revision: " + "ab12" * 10, "commit " + "ab12" * 10, "https://host/x?sv=2024-01-01&se=2026-01-01",
    'ask for ["token", "tokenizer", "key"]',
    "PWD=/home/x", "GIT_AUTHOR_NAME=Some Long Name", "tokenizer: meta-llama/Llama-3", "https://host/a/b@main",
]  # fmt: skip


@pytest.mark.parametrize("value", SHAPES)
def test_a_value_gives_itself_away_under_any_name(value):
    said = hider()(f"WHATEVER='{value}' and more")
    assert SECRET in said
    assert PW not in said
    assert value not in said
    assert looks_secret(value), "a recipe is held to the same list"


@every("text", WRITTEN)
def test_a_name_gives_its_value_away(text):
    said = hider()(text.replace("@", PW))
    assert SECRET in said
    assert PW not in said


@every("text", KEPT)
def test_what_is_no_secret_is_kept(text):
    assert hider()(text) == text


def test_no_line_of_the_corpus_is_changed():
    logs = sorted((Path(__file__).parent.parent / "corpus").rglob("*.log"))
    hide = hider()
    lines = [line for log in logs for line in log.read_text("utf-8", errors="replace").splitlines()]
    assert len(lines) > 10_000
    assert [line for line in lines if hide(line) != line] == []


@pytest.mark.parametrize(
    ("first", "many", "last"),
    [("", "sk-", ""), ("", "://", "@"), ("", "token: '", ""), ("", "--key", ""), ("eyJ", "a.", ""),
     ("", "-----BEGIN PRIVATE KEY-----", ""), ("", "hf_", ""), ("", "a", "token"), ("", "-eyJabcdefgh", ""),
     ("", 'password: "', ""), ("", "cookie: a=b; ", ""), ("", "?sig=abcd", ""), ("", "wandb login a ", ""),
     ("", '"token",', ""), ("token", " ", "=x")],
)  # fmt: skip
def test_a_long_line_is_looked_through_in_linear_time(first, many, last):
    def line(letters: int) -> str:
        return first + many * (letters // len(many)) + last

    assert cpu_growth(hider(), line, 30_000) < LINEAR


def test_values_of_the_environment_are_found_however_they_are_escaped():
    value = 'it\'s "ä/quoted" & long'
    environ = {"NCCL_NET_PASS": value, "DATABASE_URL": f"postgres://u:{PW}@h/db", "PLAIN": "stays-as-it-is"}
    hide = hider(secret_values(environ))
    for text in (
        value,
        repr(value),
        json.dumps(value),
        json.dumps(json.dumps(value)),
        f"login of {PW} failed",
    ):
        assert hide(text).count(SECRET) == 1, text
        assert "quoted" not in hide(text)
        assert PW not in hide(text)
    assert hide("stays-as-it-is") == "stays-as-it-is"
    assert not is_secret_name("GIT_AUTHOR_NAME")


def test_a_key_of_wandb_looks_like_a_commit_and_is_hidden_where_it_is_given():
    key = "0123456789abcdef" * 2 + "01234567"
    for text in (f'wandb.login(key="{key}")', f"wandb login --relogin {key}", f"login user password {key}"):
        assert key not in hider()(text)
    assert hider()(f"commit {key}") == f"commit {key}"


def test_a_private_key_without_its_end_hides_no_lines_of_others():
    hide = line_hider()
    key = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"]
    after = ["step 10 of 100, loss 2.31", "RuntimeError: CUDA out of memory", ""]
    assert [hide(line) for line in [*key, *after]] == [SECRET, SECRET, *after]


def test_a_private_key_is_hidden_over_the_lines_of_a_stream():
    hide = line_hider()
    lines = [
        "before",
        "x -----BEGIN PRIVATE KEY-----",
        "MIIabc+/",
        "tail==",
        "-----END PRIVATE KEY-----",
        "after",
    ]
    assert [hide(line) for line in lines] == ["before", f"x {SECRET}", SECRET, SECRET, SECRET, "after"]
    assert hider()("before") == "before"


def test_json_is_hidden_by_the_names_of_its_members():
    found = hide_in({"api_key": PW, "rows": [{"note": SHAPES[0]}], "key": "ab12" * 8, "n": 3}, hider())
    assert found == {"api_key": SECRET, "rows": [{"note": SECRET}], "key": "ab12" * 8, "n": 3}


def test_an_error_of_a_command_and_the_recorded_command_hold_none(tmp_path, capsys):
    error = RunFailed(Problem("run-failed", f"DATABASE_URL=postgres://u:{PW}@h", hint=f"--token {PW}"))
    for as_json in (True, False):
        emit_error("run", error, as_json=as_json)
        said = "".join(capsys.readouterr())
        assert PW not in said
        assert SECRET in said
    (tmp_path / "environment.json").write_text("{}")
    record_bound(tmp_path, {"command": ["python", f"--token={PW}", SHAPES[2]], "master_port": "29500"})
    bound = json.loads((tmp_path / "environment.json").read_text())["bound"]
    assert bound == {"command": ["python", f"--token={SECRET}", SECRET], "master_port": "29500"}


def test_diagnose_quotes_no_secret(tmp_path, capsys):
    log = tmp_path / "x.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n'
        f"RuntimeError: cannot log in to postgres://u:{PW}@h with PASSPHRASE={PW}\n"
    )
    for words in (["diagnose", str(log)], ["diagnose", str(log), "--json"]):
        main(words)
        said = "".join(capsys.readouterr())
        assert PW not in said
        assert SECRET in said
