"""Pickles with code in them: weights, adapters, checkpoints of each engine. Nothing of them ever runs."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.errors import RecipeError

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from launcher.train.checkpoint.pickles import check_pickles, save_members_by_value  # noqa: E402
from launcher.train.checkpoint.resuming import ready_checkpoint  # noqa: E402
from launcher.train.engines import deepspeed, fsdp  # noqa: E402
from launcher.train.model.adapters import attach_adapter  # noqa: E402
from launcher.train.model.models import load_model  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from small import job, llama, lora, tokenizer  # noqa: E402


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.fixture
def trace(tmp_path):
    """What exists when code of a pickle ran; never, at the end of a test."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists(), "code of a pickle ran"


def test_the_pickle_of_these_tests_does_run_code(tmp_path):
    torch.save({"w": Evil(tmp_path / "ran")}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "ran").is_dir()


def states(**more):
    """What DeepSpeed's ZeRO optimizers save, as DeepSpeed 0.19.8 makes it."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    dynamic = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 2,
               "consecutive_hysteresis": False}  # fmt: skip
    return {
        "optimizer_state_dict": {
            "loss_scaler": LossScaler(1.0),
            "dynamic": CreateLossScaler(torch.half, 1.0, dynamic_scaling=True, dynamic_loss_args=dynamic),
            "zero_stage": ZeroStageEnum.gradients,
            "param_slice_mappings": [{"w": fragment_address(numel=4, start=0)}],
            "partition": torch.nn.Parameter(torch.ones(4)),
        },
        **more,
    }


def zero_checkpoint(folder: Path, **more) -> Path:
    save_members_by_value(deepspeed.TRAIN_ENGINE.pickled_enum)
    step = folder / "checkpoint-2" / "global_step2"
    step.mkdir(parents=True)
    torch.save({"module": {"w": torch.ones(4)}, "ds_config": {}}, step / "mp_rank_00_model_states.pt")
    torch.save(states(**more), step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (step.parent / "latest").write_text("global_step2")
    return step.parent


def refused(checkpoint: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        ready_checkpoint(checkpoint)
    (problem,) = caught.value.problems
    assert problem.code == "unsafe-pickle"
    return f"{problem.file}: {problem.message}"


def test_states_as_deepspeed_writes_them_are_read(tmp_path):
    check_pickles(zero_checkpoint(tmp_path))


def test_code_in_deepspeeds_states_is_named_and_not_run(tmp_path, trace):
    said = refused(zero_checkpoint(tmp_path, more=Evil(trace)))
    assert "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt: " in said
    assert said.endswith("reading it would call posix.mkdir")


def test_a_whole_attribute_path_is_one_name(tmp_path, trace):
    """`collections OrderedDict.fromkeys` is not `collections OrderedDict`."""
    checkpoint = zero_checkpoint(tmp_path)
    path = checkpoint / "global_step2" / "mp_rank_00_model_states.pt"
    rewrite(path, b"\x80\x02ccollections\nOrderedDict.fromkeys\n(tR.")
    assert "OrderedDict.fromkeys" in refused(checkpoint)


def rewrite(path: Path, pickled: bytes) -> None:
    """Another pickle in the zip file of torch.save."""
    with zipfile.ZipFile(path) as given:
        parts = {name: given.read(name) for name in given.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        for name, content in parts.items():
            made.writestr(name, pickled if name.endswith("data.pkl") else content)


@pytest.mark.parametrize("protocol", [0, 1, 4, 5])
def test_pickles_that_torch_does_not_write_are_refused(tmp_path, trace, protocol):
    checkpoint = zero_checkpoint(tmp_path)
    path = checkpoint / "global_step2" / "mp_rank_00_model_states.pt"
    rewrite(path, pickle.dumps(Evil(trace), protocol=protocol))
    assert "mp_rank_00_model_states.pt" in refused(checkpoint)


def test_a_plain_pickle_in_place_of_a_zip_file_is_refused(tmp_path, trace):
    checkpoint = zero_checkpoint(tmp_path)
    (checkpoint / "global_step2" / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Evil(trace)))
    assert "torch.save did not write it" in refused(checkpoint)


@pytest.mark.parametrize("tag", ["../elsewhere", "/elsewhere", "..", ""])
def test_the_word_in_latest_does_not_lead_out_of_the_checkpoint(tmp_path, tag):
    checkpoint = zero_checkpoint(tmp_path)
    (checkpoint / "latest").write_text(tag)
    assert "out of the checkpoint" in refused(checkpoint)


def test_a_linked_folder_is_looked_into(tmp_path, trace):
    zero_checkpoint(tmp_path / "a", more=Evil(trace))
    linked = tmp_path / "b" / "checkpoint-2"
    linked.mkdir(parents=True)
    (linked / "global_step2").symlink_to(tmp_path / "a" / "checkpoint-2" / "global_step2")
    assert "posix.mkdir" in refused(linked)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_the_trainers_own_states_are_looked_at_too(tmp_path, trace, name):
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    torch.save({"state": {}}, checkpoint / "optimizer.pt")
    torch.save({"state": Evil(trace)}, checkpoint / name)
    assert f"{name}: " in refused(checkpoint)


def sharded(folder: Path, **more) -> Path:
    """A checkpoint as FSDP2 writes its optimizer."""
    from torch.distributed import checkpoint as dcp

    save_members_by_value(fsdp.TRAIN_ENGINE.pickled_enum)
    shards = folder / "checkpoint-2" / "optimizer_0"
    shards.mkdir(parents=True)
    value = {"state": {"w": torch.ones(4)}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], **more}
    dcp.save({"optimizer": value}, checkpoint_id=shards, no_dist=True)
    return shards.parent


@pytest.mark.parametrize("engine", [deepspeed, fsdp], ids=lambda engine: engine.__name__)
def test_members_are_saved_by_value_whatever_the_python(engine, monkeypatch):
    module, name = enumeration = engine.TRAIN_ENGINE.pickled_enum
    kind = getattr(importlib.import_module(module), name)
    # As Python 3.11.2 does it.
    monkeypatch.setattr(kind, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    member = next(iter(kind))
    assert b"getattr" in pickle.dumps(member, 2)
    save_members_by_value(enumeration)
    assert b"getattr" not in pickle.dumps(member, 2)
    assert pickle.loads(pickle.dumps(member, 2)) is member


def test_sharded_states_are_read(tmp_path):
    check_pickles(sharded(tmp_path))


def test_code_among_sharded_states_is_named_and_not_run(tmp_path, trace):
    said = refused(sharded(tmp_path, more=Evil(trace)))
    assert ".distcp: " in said
    assert "posix.mkdir" in said


def test_code_in_the_description_of_shards_is_named_and_not_run(tmp_path, trace):
    checkpoint = sharded(tmp_path)
    (checkpoint / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(Evil(trace)))
    assert ".metadata: " in (said := refused(checkpoint))
    assert "posix.mkdir" in said


def test_the_description_of_shards_does_not_lead_out_of_the_checkpoint(tmp_path):
    import dataclasses

    checkpoint = sharded(tmp_path)
    path = checkpoint / "optimizer_0" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data = {
        index: dataclasses.replace(info, relative_path="../../other")
        for index, info in metadata.storage_data.items()
    }
    stream = io.BytesIO()
    pickle.dump(metadata, stream)
    path.write_bytes(stream.getvalue())
    assert "out of the checkpoint" in refused(checkpoint)


def test_weights_in_a_pickle_are_read_and_code_among_them_is_not_run(tmp_path, trace):
    folder = tmp_path / "model"
    model = llama()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    asked = {"tiny": False, "model.config": None, "model.name_or_path": str(folder)}
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    run = job(tmp_path / "run", asked)
    assert load_model(run, tokenizer()).num_parameters() == model.num_parameters()
    torch.save({**model.state_dict(), "more": Evil(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(RecipeError) as caught:
        load_model(run, tokenizer())
    assert caught.value.problems[0].code == "unsafe-pickle"


def test_an_adapter_in_a_pickle_is_read_and_code_in_it_is_not_run(tmp_path, trace):
    from safetensors.torch import load_file

    folder = tmp_path / "adapter"
    lora(llama()).save_pretrained(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(weights, folder / "adapter_model.bin")
    run = job(tmp_path / "run", {"adapter.type": "lora", "adapter.path": str(folder)})
    assert attach_adapter(run, llama(), tokenizer()).num_parameters() > 0
    torch.save({**weights, "more": Evil(trace)}, folder / "adapter_model.bin")
    with pytest.raises(RecipeError) as caught:
        attach_adapter(run, llama(), tokenizer())
    assert caught.value.problems[0].code == "unsafe-pickle"


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "rows.npy", "rows.pickle"])
def test_rows_are_never_read_from_a_pickle(tmp_path, trace, name):
    from launcher.rows.sources import iter_rows

    (tmp_path / name).write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(RecipeError):
        list(iter_rows({"path": str(tmp_path / name)}))
