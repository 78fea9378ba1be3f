"""What earlier runs change in an estimate: records, similarity, shrinkage, ranges."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from factories import plan
from hypothesis import given
from hypothesis import strategies as st

from launcher.machine.hardware import parse_hardware
from launcher.memory.calibration import (
    CPU_RANGE,
    CUDA_RANGE,
    PRIOR_RUNS,
    calibrated_ratios,
    covering_range,
    device_context,
    job_kind,
    memory_range,
    similar_runs,
)
from launcher.memory.estimate import estimate_memory
from launcher.memory.phases import CUDA_CONTEXT
from launcher.models.measured_runs import KEPT, Calibration, JobKind, MeasuredRun, read_calibration, read_run
from launcher.report.memory_sections import memory_section
from launcher.report.sections import line

GIB = 2**30
MIB = 2**20
KIND = JobKind(
    model_type="llama", task="causal-lm", engine="deepspeed", zero_stage=2, precision="bf16",
    quantization="none", adapter=True, checkpointing=True, attention="sdpa", optim="adamw_torch_fused",
    offload="none",
)  # fmt: skip
PRIOR = (0.95, 1.16)
DEVICE = parse_hardware("A100-80GB")


def run(
    ratio: float = 1.0, *, context: int = 500 * MIB, tensors: int = 20 * GIB, **changes: object
) -> MeasuredRun:
    """A finished run that took `ratio` of its estimate beside the context."""
    made = MeasuredRun(
        device="A100-80GB", method="cuda-reserved+context", torch="2.13.0", transformers="5.23.0", kind=KIND,
        processes=8, params=7_000_000_000, steps=10, predicted_by="closed-form",
        predicted=tensors + CUDA_CONTEXT, components={"weights": tensors, "context": CUDA_CONTEXT},
        measured=round(ratio * tensors) + context, allocated=tensors, context=context,
        device_bytes=DEVICE.device_bytes,
    )  # fmt: skip
    return replace(made, **changes)


def calibration(*runs: MeasuredRun) -> Calibration:
    return Calibration(runs, "calibration.jsonl")


# --- the file


def test_a_run_is_read_back_as_it_was_written():
    text = run(1.03).to_line() + run(0.98).to_line()
    found = read_calibration(text, DEVICE, "here")
    assert found == Calibration((run(1.03), run(0.98)), "here")
    assert found.runs[0].ratio == pytest.approx(1.03)


@pytest.mark.parametrize(
    "line",
    [
        "half a li", "[]", "7", "null", "{}", '{"schema_version": 1}', "[" * 5000,
        run().to_line().replace('"schema_version": 1', '"schema_version": 2'),
        run().to_line().replace('"steps": 10', '"steps": true'),
        run().to_line().replace('"steps": 10', '"steps": 1.5'),
        run().to_line().replace('"steps": 10', '"steps": 10, "surplus": 1'),
        run().to_line().replace('"device": "A100-80GB"', '"device": null'),
        run().to_line().replace('"llama"', "7"),
        run(predicted=0).to_line(), run(predicted=-1).to_line(), run(measured=0).to_line(),
        run(components={"weights": "much"}).to_line(),
        run().to_line()[:-10],
    ],
)  # fmt: skip
def test_lines_that_are_no_runs_are_counted_and_skipped(line):
    assert read_run(line) is None
    found = read_calibration(f"{line}\n\n{run().to_line()}", DEVICE, "here")
    assert (found.runs, found.skipped) == ((run(),), 1)


@given(st.text())
def test_no_text_breaks_the_reading(text):
    read_calibration(text, DEVICE, "here")


def test_only_runs_of_the_device_and_its_way_of_measuring_are_kept_and_the_newest_of_them():
    others = [run(device="H100-80GB"), run(method="cpu-tensor-storages")]
    many = [run(steps=step) for step in range(2, 2 + KEPT + 5)]
    found = read_calibration("".join(r.to_line() for r in (*others, *many)), DEVICE, "here")
    assert found.runs == tuple(many[5:])
    assert found.skipped == 0


# --- the context


def test_the_smallest_measured_context_replaces_the_published_one():
    job = plan_job()
    runs = calibration(run(context=900 * MIB), run(context=520 * MIB), run(context=300 * MIB, processes=1))
    assert device_context(job, DEVICE, runs, CUDA_CONTEXT) == (520 * MIB, "context of 520 MiB from 2 runs")
    assert device_context(job, DEVICE, calibration(), CUDA_CONTEXT) == (CUDA_CONTEXT, None)
    assert device_context(job, DEVICE, None, CUDA_CONTEXT) == (CUDA_CONTEXT, None)
    assert device_context(job, parse_hardware("cpu"), runs, CUDA_CONTEXT) == (0, None)


def test_what_cuda_does_not_show_of_the_device_is_part_of_its_context():
    hidden = run(device_bytes=DEVICE.device_bytes - 400 * MIB)
    assert device_context(plan_job(), DEVICE, calibration(hidden), CUDA_CONTEXT)[0] == 900 * MIB


def plan_job():
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return plan(Path(folder)).job


# --- similarity


def test_each_difference_and_each_doubling_halves_the_weight():
    size = 20 * GIB

    def weight(found: MeasuredRun, method: str = "closed-form") -> float:
        runs = similar_runs(KIND, size, method, calibration(found))
        return runs[0][1] if runs else 0.0

    assert weight(run()) == 1
    assert weight(run(kind=KIND._replace(attention="eager"))) == 0.5
    assert weight(run(kind=KIND._replace(attention="eager", zero_stage=3, adapter=False))) == 0.125
    assert weight(run(kind=KIND._replace(attention="eager", zero_stage=3, adapter=False, task="dpo"))) == 0
    assert weight(run(tensors=10 * GIB)) == weight(run(tensors=40 * GIB)) == 0.5
    assert weight(run(tensors=20 * MIB)) == 0, "a toy says nothing of a big model"
    assert weight(run(), "trace") == 0
    assert weight(run(steps=1)) == 0, "one step never holds activations beside optimizer states"


# --- the range


def test_without_runs_the_range_is_that_of_the_committed_records():
    assert calibrated_ratios([], PRIOR) == (0.95, 1.0, 1.16)


def test_few_runs_are_shrunk_towards_the_estimate_and_many_are_believed():
    one, three, many = (calibrated_ratios([(1.2, 1.0)] * n, PRIOR)[1] for n in (1, PRIOR_RUNS, 60))
    assert one == pytest.approx(1.2 ** (1 / (1 + PRIOR_RUNS)))
    assert three == pytest.approx(1.2**0.5)
    assert one < three < many < 1.2
    assert many == pytest.approx(1.2, rel=0.01)


def test_runs_that_met_the_estimate_narrow_the_range():
    widths = [
        high - low for low, _, high in (calibrated_ratios([(1.0, 1.0)] * n, PRIOR) for n in (0, 1, 3, 20))
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.15 * widths[0]


@pytest.mark.parametrize("ratio", [0.8, 0.95, 1.1, 1.5])
@pytest.mark.parametrize("prior", [PRIOR, CPU_RANGE])
def test_one_run_leaves_a_range_at_least_as_wide_as_its_error(ratio, prior):
    low, _, high = calibrated_ratios([(ratio, 1.0)], prior)
    assert high - low > abs(ratio - 1)
    assert low < min(1.0, ratio)
    assert high > max(1.0, ratio)


ratios = st.floats(0.3, 3.0)
weights = st.floats(0.125, 1.0)


@given(st.lists(st.tuples(ratios, weights), min_size=1, max_size=20))
def test_no_miss_is_hidden(found):
    low, expected, high = calibrated_ratios(found, PRIOR)
    for ratio, _ in found:
        assert low <= ratio * (1 + 1e-9)
        assert high >= ratio * (1 - 1e-9)
    assert low <= expected * (1 + 1e-9)
    assert expected <= high * (1 + 1e-9)
    seen = [ratio for ratio, _ in found]
    assert min(1.0, *seen) * (1 - 1e-9) <= expected <= max(1.0, *seen) * (1 + 1e-9)


@pytest.mark.parametrize("bias", [0.9, 1.0, 1.1])
@pytest.mark.parametrize(("count", "least"), [(2, 0.75), (6, 0.85), (20, 0.9)])
def test_the_range_of_some_runs_holds_the_next_one(bias, count, least):
    """Errors of 3 % around a bias of the estimate that the runs have to find out."""
    rng = random.Random(7)
    held, trials = 0, 400
    for _ in range(trials):
        *seen, following = (rng.lognormvariate(0, 0.03) * bias for _ in range(count + 1))
        low, _, high = calibrated_ratios([(ratio, 1.0) for ratio in seen], PRIOR)
        held += low <= following <= high
    assert held / trials >= least


def test_the_note_says_how_many_runs_and_what_they_took():
    span, note = memory_range(
        20 * GIB, 500 * MIB, KIND, "closed-form", calibration(run(1.02), run(1.1), run(tensors=MIB)), PRIOR
    )
    assert note == "range from 2 runs like it, which took 1.02 to 1.10 of their estimates"
    assert span.low < span.expected < span.high
    assert span.high >= 1.1 * 20 * GIB + 500 * MIB
    assert memory_range(20 * GIB, 0, KIND, "closed-form", calibration(run(tensors=MIB)), PRIOR)[1] is None


# --- the default range


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60), st.floats(0.5, 1.0))
def test_a_covering_range_covers(found, share):
    low, high = covering_range(found, share)
    assert sum(low <= ratio <= high for ratio in found) >= (share - 1e-6) * len(found)
    assert low <= 1 <= high


def test_a_covering_range_leaves_out_the_extremes():
    found = [0.5, *[1 + i / 100 for i in range(-9, 9)], 1.9]
    assert covering_range(found, 0.9) == (0.91, 1.08)


# --- in an estimate


@pytest.fixture
def planned(tmp_path):
    return plan(tmp_path, on="8xA100-80GB")


def test_an_estimate_takes_context_and_range_from_runs_like_it(planned):
    spec, job, hardware = planned.spec, planned.job, planned.hardware
    plain = estimate_memory(spec, job, hardware)
    before = plain.components.outside
    tensors = plain.total - before
    like = [run(1.2, kind=job_kind(spec, job), tensors=tensors, context=600 * MIB) for _ in range(9)]
    found = estimate_memory(spec, job, hardware, calibration=calibration(*like))
    assert plain.calibration is None
    assert (plain.low, plain.expected) == (before + round(CUDA_RANGE[0] * tensors), plain.total)
    assert found.components.outside == 600 * MIB
    assert found.components == replace(
        plain.components, context=found.components.context, nccl=found.components.nccl
    ), "computed, not corrected"
    assert found.total == plain.total - before + 600 * MIB
    assert found.eval_peak == plain.eval_peak - before + 600 * MIB
    assert found.calibration == (
        "context of 600 MiB from 9 runs; range from 9 runs like it, which took 1.20 of their estimates, "
        "on A100-80GB (calibration.jsonl)"
    )
    assert found.expected == pytest.approx(600 * MIB + tensors * 1.2 ** (9 / 12), rel=1e-6)
    assert found.needed >= found.expected > plain.total
    assert found.high == pytest.approx(600 * MIB + 1.2 * CUDA_RANGE[1] ** (3 / 12) * tensors, rel=1e-6)
    assert json.loads(json.dumps(found.to_json()))["calibration"] == found.calibration


def test_runs_that_took_more_make_a_plan_refuse_and_none_that_took_less_makes_it_accept(planned):
    spec, job, hardware = planned.spec, planned.job, planned.hardware
    plain = estimate_memory(spec, job, hardware)
    tensors = plain.total - CUDA_CONTEXT
    size = int((plain.needed + 10 * MIB) / 0.95)
    tight, small = replace(hardware, device_bytes=size), replace(hardware, device_bytes=int(plain.needed))

    def fits(ratio: float, machine: object) -> bool | None:
        like = [
            run(ratio, kind=job_kind(spec, job), tensors=tensors, context=CUDA_CONTEXT, device_bytes=10**12)
            for _ in range(20)
        ]
        return estimate_memory(spec, job, machine, calibration=calibration(*like)).fits

    assert estimate_memory(spec, job, tight).fits
    assert fits(1.0, tight)
    assert fits(1.3, tight) is False
    assert fits(0.5, small) is False


def test_a_plan_that_fits_says_when_the_end_of_its_range_would_not(planned):
    def says(memory) -> bool:
        section = memory_section({"memory": memory.to_json()})
        return any("the likely peak fits" in line(note) for note in section.blocks[-1].items)

    tight = replace(planned.memory, fits=True, device_bytes=planned.memory.high - 1)
    assert says(tight)
    assert not says(planned.memory)
    assert not says(replace(tight, fits=None, device_bytes=None))
