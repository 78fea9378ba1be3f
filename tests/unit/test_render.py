"""The bundle: one number in every file, nothing "auto", launch lines that the launchers accept."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess

import pytest
import yaml
from factories import BASE, facts, plan, recipe

from launcher.errors import RecipeError
from launcher.planner.planner import make_plan
from launcher.render.bundle import render

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
ZERO = {"global_batch_size": 64, "trainer__max_grad_norm": 0.7}


def rendered(tmp_path, on="8xA100-80GB", text=BASE, **overrides):
    return render(plan(tmp_path, on, text, **overrides))


def every_value(node):
    if isinstance(node, dict):
        for value in node.values():
            yield from every_value(value)
    else:
        yield node


@pytest.mark.parametrize("on", ["8xA100-80GB", "8xV100-32GB", "2xcpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ds_config_and_training_arguments_say_the_same(tmp_path, on, stage):
    bundle = rendered(tmp_path, on, sharding__zero_stage=stage, **ZERO)
    config, written = bundle.ds_config, json.loads(bundle.files["plan.json"])
    setting = {key: s["value"] for key, s in written["settings"].items()}
    assert json.loads(bundle.files["ds_config.json"]) == config == written["ds_config"]
    assert config["train_micro_batch_size_per_gpu"] == setting["trainer.per_device_train_batch_size"]
    assert config["gradient_accumulation_steps"] == setting["trainer.gradient_accumulation_steps"]
    assert config["gradient_clipping"] == setting["trainer.max_grad_norm"] == 0.7
    assert config.get("bf16", {}).get("enabled", False) == setting["trainer.bf16"]
    assert config.get("fp16", {}).get("enabled", False) == setting["trainer.fp16"]
    assert config["zero_optimization"]["stage"] == stage == setting["sharding.zero_stage"]
    assert "auto" not in list(every_value(config))
    assert not {"optimizer", "scheduler", "train_batch_size"} & config.keys()
    assert written["batch"]["global"] == 64


def test_offload_is_written_where_it_is_asked(tmp_path):
    asked = {"sharding__offload_optimizer": "cpu", "sharding__zero_stage": 2}
    zero = rendered(tmp_path, **asked).ds_config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    unasked = rendered(tmp_path, sharding__zero_stage=2).ds_config["zero_optimization"]
    assert "offload_optimizer" not in unasked


def test_zero3_of_a_full_fine_tune_saves_whole_weights(tmp_path):
    zero = rendered(tmp_path, text=FULL, sharding__zero_stage=3).ds_config["zero_optimization"]
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert all(isinstance(zero[k], int) for k in zero if k.endswith(("bucket_size", "threshold")))


def test_a_profile_key_is_kept_and_cannot_replace_the_plans_own(tmp_path):
    profile = {"zero_optimization": {"stage": 2, "round_robin_gradients": True, "overlap_comm": True}}
    loaded = recipe(tmp_path, sharding__config="mine.json")
    zero = render(make_plan(loaded, facts(profile=profile))).ds_config["zero_optimization"]
    assert zero["round_robin_gradients"] is True
    assert zero["stage"] == 2


def test_deepspeed_on_gpus_names_devices_and_never_num_gpus(tmp_path):
    command = list(rendered(tmp_path, sharding__zero_stage=2).command)
    assert command[1:3] == ["-m", "deepspeed.launcher.runner"]
    # An absent hostfile of its own: DeepSpeed's default, /job/hostfile, may list other machines.
    assert command[3:5] == ["--hostfile", "{run_dir}/hostfile"]
    assert command[5:9] == ["--include", "localhost:{devices}", "--master_port", "{master_port}"]
    assert "--num_gpus" not in command
    assert command[-3:] == ["--module", "launcher.train.worker", "{run_dir}"]


def test_deepspeed_on_a_cpu_needs_num_gpus(tmp_path):
    command = list(rendered(tmp_path, "2xcpu").command)
    assert command[3:7] == ["--hostfile", "{run_dir}/hostfile", "--num_gpus", "2"]


def test_accelerate_gets_its_config_file_and_a_port(tmp_path):
    bundle = rendered(tmp_path, sharding__engine="ddp")
    command = list(bundle.command)
    assert command[command.index("--config_file") + 1] == "{run_dir}/accelerate.yaml"
    assert command[command.index("--main_process_port") + 1] == "{master_port}"
    assert command[command.index("--log_dir") + 1] == "/dev/null"
    assert "num_processes: 8" in bundle.files["accelerate.yaml"]
    assert "deepspeed" not in bundle.files["accelerate.yaml"]
    assert bundle.ds_config is None


def test_one_process_is_plain_python_and_deepspeed_gets_its_rendezvous(tmp_path):
    plain = rendered(tmp_path, "1xA100-80GB")
    zero = rendered(tmp_path, "1xA100-80GB", sharding__zero_stage=2)
    assert list(plain.command)[1:] == ["-m", "launcher.train.worker", "{run_dir}"]
    assert "RANK" not in plain.env
    assert (zero.env["WORLD_SIZE"], zero.env["MASTER_PORT"]) == ("1", "{master_port}")


def test_deepspeeds_own_launcher_is_refused_over_several_nodes(tmp_path):
    with pytest.raises(RecipeError) as caught:
        rendered(tmp_path, "2x2xA100-80GB", sharding__engine="deepspeed", launch__launcher="deepspeed")
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("launcher-conflict", "launch.launcher")


def test_rendering_is_stable(tmp_path):
    made = plan(tmp_path)
    assert render(made) == render(made)


def test_a_secret_stays_a_reference(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "s3cret-value")
    text = BASE + "launch: {env: {WANDB_API_KEY: '${ENV:MY_KEY}'}}\n"
    bundle = rendered(tmp_path, text=text)
    assert not [name for name, body in bundle.files.items() if "s3cret-value" in body]
    assert bundle.env["WANDB_API_KEY"] == "${ENV:MY_KEY}"
    assert 'WANDB_API_KEY="${MY_KEY}"' in bundle.files["command.sh"]


def test_command_sh_is_valid_bash(tmp_path):
    text = BASE + 'launch: {env: {NOTE: "it\'s; $(rm -rf x) `y`"}}\n'
    for on in ("8xA100-80GB", "1xA100-80GB", "2xcpu"):
        script = rendered(tmp_path, on, text).files["command.sh"]
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "-"], input=script, text=True, check=True)
    lines = [line for line in script.splitlines() if line.startswith("export NOTE")]
    shown = subprocess.run(
        ["bash", "-c", f'{lines[0]}; printf %s "$NOTE"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "it's; $(rm -rf x) `y`"


def started_by_hand(script, folder, **env):
    """What command.sh would start: argv and environment; the words are printed, nothing is started."""
    lines = [line for line in script.splitlines() if "launcher.train.prepare" not in line]
    shown = "\n".join(lines).replace("\nexec ", "\nprintf '%s\\n' ") + "\nprintf '=\\n'; env\n"
    path = folder / "command.sh"
    path.write_text(shown, encoding="utf-8")
    several = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    return subprocess.run(
        ["bash", str(path)], capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], **several, **env},
    )  # fmt: skip


def devices_of(done, launcher, nodes):
    """The device ids that the launcher is told."""
    argv, _, env = done.stdout.partition("=\n")
    argv, env = argv.split("\n"), dict(line.partition("=")[::2] for line in env.splitlines())
    if launcher != "deepspeed" or nodes > 1:
        assert not any("{devices}" in word or "include" in word for word in argv)
        return env["CUDA_VISIBLE_DEVICES"]
    assert env.get("CUDA_VISIBLE_DEVICES", "all") in ("all", "4,5,6,7,2,3,0,1,9")
    host, _, ids = argv[argv.index("--include") + 1].partition(":")
    assert host == "localhost"
    return ids


@pytest.mark.parametrize(
    ("launcher", "nodes", "count"),
    [*itertools.product(("deepspeed", "accelerate"), (1, 2), (1, 2, 8)), ("python", 1, 1)],
)
def test_command_sh_starts_as_many_devices_as_are_planned(tmp_path, launcher, nodes, count):
    engine = "deepspeed" if launcher == "deepspeed" else "ddp"
    asked = "auto" if nodes > 1 else launcher
    bundle = rendered(tmp_path, f"{nodes}x{count}xA100-80GB", sharding__engine=engine, launch__launcher=asked)
    script = bundle.files["command.sh"]
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-"], input=script, text=True, check=True)
    done = started_by_hand(script, tmp_path)
    assert devices_of(done, launcher, nodes) == ",".join(map(str, range(count)))
    if launcher == "accelerate" and nodes == 1 and count > 1:
        assert yaml.safe_load(bundle.files["accelerate.yaml"])["num_processes"] == count

    # Those that the shell names, as many as are planned: more would be another number of ranks.
    done = started_by_hand(script, tmp_path, CUDA_VISIBLE_DEVICES="4,5,6,7,2,3,0,1,9")
    assert devices_of(done, launcher, nodes) == "4,5,6,7,2,3,0,1"[: 2 * count - 1]
    for too_few in ("", ",".join("0" * (count - 1))):
        done = started_by_hand(script, tmp_path, CUDA_VISIBLE_DEVICES=too_few)
        assert (done.returncode, done.stdout) == (4, ""), too_few
        assert f"{count} GPUs" in done.stderr


def test_command_sh_of_a_model_spread_over_devices_sees_them_all(tmp_path):
    text = BASE.replace("model: {", "model: {device_map: auto, ")
    bundle = rendered(tmp_path, "1x4xA100-80GB", text, sharding__engine="ddp", launch__launcher="python")
    done = started_by_hand(bundle.files["command.sh"], tmp_path)
    assert devices_of(done, "python", 1) == "0,1,2,3"
