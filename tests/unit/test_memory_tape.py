"""The replay of a backward pass on sizes alone: what is kept, what is added in place, what lives at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import step_of

from launcher.engines.ddp import DDP
from launcher.machine.hardware import parse_hardware
from launcher.memory.activations import lora_rank, make_block, make_stacks
from launcher.memory.job import MemoryJob
from launcher.memory.layers import layer_cost, record
from launcher.memory.loss import head_cost
from launcher.memory.phases import training_phases
from launcher.models.layers.layout import Block, Dtypes
from launcher.models.layers.tape import Storage, Tape
from launcher.models.lora import adapted_paths, lora_params
from launcher.models.model import ModelSpec, read_model_spec

SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip


def spec(model_type: str = "llama", **more: object) -> ModelSpec:
    return read_model_spec(model_type, {"model_type": model_type, **SIZES, **more}, "test")


def block(d: Dtypes, model: ModelSpec | None = None, **more: object) -> Block:
    model = model or spec()
    return replace(make_block(model, d, model.layout, 2, 16, "sdpa"), **more)


FLOAT, AUTOCAST = Dtypes(4, 4, False, None, True), Dtypes(2, 4, True, None, True)
CPU, A100 = parse_hardware("cpu"), parse_hardware("1xA100-80GB")
JOB = MemoryJob(
    micro_batch=2, sequence_length=16, data_parallel=1, devices_per_node=1, precision="fp32",
    dtype="float32", quantization="none", double_quant=False, trainable_params=spec().params, adapter=False,
    engine=DDP, zero_stage=0, offload_optimizer="none", offload_param="none", optim="adamw_torch_fused",
    checkpointing=False, attention="sdpa", reduce_bucket_size=1, allgather_bucket_size=1,
    overlap_comm=False, eval_batch=1, accumulation=1,
)  # fmt: skip


def test_a_product_keeps_its_input_and_makes_two_gradients() -> None:
    tape = Tape()
    x = tape.source(100, 4)
    y = tape.step([x], 50, 4, saves=[x.storage], params=20, fresh=80)
    assert tape.saved() == (400, 0)
    peak = tape.backward(y, 4.0, accumulated=False)
    # Input, gradients of output and input, and of the weight.
    assert (peak.total, peak.saved, peak.gradients) == (400 + 200 + 400 + 80, 400, 0)


@pytest.mark.parametrize(("views", "peak"), [(False, 10 + 2 * 100), (True, 3 * 100)])
def test_gradients_that_are_views_are_added_apart(views: bool, peak: int) -> None:
    """Two products of one value: the second gradient beside the first and the one it is made of, then both
    beside their sum, if the first is a view of something."""
    tape = Tape()
    x = tape.source(100, 1)
    parts = [tape.step([x], 10, 1, makes_views=views) for _ in range(2)]
    total = tape.step(parts, 10, 1, passes=True)
    assert tape.backward(total, 0.0, accumulated=False).total == peak


def recomputed_tape() -> tuple[Tape, object]:
    """400 bytes in; 80 that are kept; two wide ones that are not; a sum that no derivative reads."""
    tape = Tape()
    x = tape.source(100, 4, counted=False)
    small = tape.step([x], 20, 4, saves=[x.storage])
    wide = tape.step([small], 200, 4, saves=[small.storage])
    wider = tape.step([wide], 300, 4)
    kept = tape.step([wider], 10, 4, saves=[Storage(7)])
    return tape, tape.step([kept], 100, 4)


def test_a_checkpoint_computes_again_what_is_not_kept_up_to_the_last_that_is() -> None:
    tape, _ = recomputed_tape()
    peak = tape.recomputed()
    # The input of the second product, and both wide values; the last operation keeps nothing and is not run.
    assert (peak.total, peak.saved) == (80 + 800 + 1200, 80)


def test_the_first_pass_is_complete_and_has_the_copies_of_a_cpu() -> None:
    tape, out = recomputed_tape()
    narrow = tape.step([], 400, 2)
    tape.step([out, narrow], 400, 4)
    # The 80 bytes that are kept, 7 of the product before, the operands and the sum.
    assert tape.first_pass().total == max(80 + 800 + 1200, 80 + 7 + 400 + 800 + 1600)
    tape.on_cpu = True
    tape.step([out, narrow], 400, 4)
    assert tape.first_pass().total == 80 + 7 + 400 + 800 + 1600 + 1600


def test_what_a_checkpoint_computes_again_adds_to_the_gradients_that_wait() -> None:
    tape, out = recomputed_tape()
    without = tape.backward(out, 0.0, accumulated=True)
    tape, out = recomputed_tape()
    peak = tape.backward(out, 0.0, accumulated=True, recompute=True)
    # 400 bytes arrive, of which 40 are made; these wait when the first derivative asks for what was kept.
    assert (peak.total, peak.saved) == (40 + 80 + 800 + 1200, 80)
    assert without.total < peak.total


def test_an_argument_is_alive_until_its_function_returns() -> None:
    tape = Tape()
    x = tape.source(10, 4, counted=False)
    read = tape.step([x], 100, 4)
    small = tape.step([read], 1, 4)
    large = tape.step([small], 500, 4)
    without = tape.recomputed().total
    tape.step([large], 1, 4, saves=[Storage(3)])
    assert (without, tape.recomputed().total) == (0, 2000 + 4 + 3)
    tape.reads(read)
    assert tape.recomputed().total == 400 + 2000 + 4 + 3


def test_nothing_is_kept_where_nothing_asks_for_a_gradient() -> None:
    tape = Tape()
    x = tape.source(100, 4, grad=False)
    assert tape.step([x], 50, 4, saves=[x.storage]).node is None
    assert tape.saved() == (0, 0)


def test_a_storage_that_two_steps_keep_counts_once_and_lives_until_both_ran() -> None:
    tape = Tape()
    x = tape.source(100, 4)
    first = tape.step([x], 100, 4, saves=[x.storage])
    second = tape.step([first], 100, 4, saves=[x.storage])
    assert tape.saved() == (400, 0)
    assert tape.backward(second, 4.0, accumulated=False).saved == 400


def test_two_gradients_of_one_value_are_added_in_place() -> None:
    tape = Tape()
    x = tape.source(100, 4)
    a, b = tape.step([x], 100, 4), tape.step([x], 100, 4)
    out = tape.step([a, b], 100, 4, passes=True)
    # The sum's gradient serves both; each then makes one of its own: three at once, never four.
    assert tape.backward(out, 4.0, accumulated=False).total == 3 * 400


def test_what_a_context_holds_is_never_freed() -> None:
    tape = Tape()
    x = tape.source(100, 4)
    y = tape.step([x], 100, 4)
    tape.hold(x.storage)
    kept = Storage(1000)
    z = tape.step([y], 100, 4, saves=[kept])
    assert tape.saved() == (1400, 0)
    assert tape.backward(z, 4.0, accumulated=False).saved == 1400


def test_gradients_that_exist_already_do_not_pile_up() -> None:
    layer = block(FLOAT)
    fresh = layer_cost(layer, 4.0, accumulated=False, checkpointed=False)
    added = layer_cost(layer, 4.0, accumulated=True, checkpointed=False)
    assert added.peak.gradients == 0 < fresh.peak.gradients <= 4 * fresh.params


def test_the_tape_counts_every_trained_parameter_of_a_layer() -> None:
    model = spec("qwen3", head_dim=32)
    cost = layer_cost(block(FLOAT, model), 4.0, accumulated=False, checkpointed=False)
    layout = model.layout
    assert cost.params == sum(x.params for x in layout.linears) // 2 + layout.layer_extra


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_counted_too(model_type: str) -> None:
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    model = spec(model_type, **experts, moe_intermediate_size=32, head_dim=16)
    cost = layer_cost(block(FLOAT, model), 4.0, accumulated=False, checkpointed=False)
    layout = model.layout
    assert cost.params == sum(x.params for x in layout.linears) // 2 + layout.layer_extra


def test_autocast_keeps_a_copy_of_each_weight_but_not_of_16_bit_ones() -> None:
    model = spec()
    per_layer = model.linear_weights // 2
    tape, _ = record(block(AUTOCAST), counted=True)
    assert tape.saved()[1] == 2 * per_layer
    tape, _ = record(block(Dtypes(2, 2, True, None, True)), counted=True)
    assert tape.saved()[1] == 0


def test_only_adapted_products_have_adapters() -> None:
    model = spec()
    paths = adapted_paths(model, ["q_proj", "v_proj"])
    job = replace(
        JOB, adapter=True, adapted=paths, trainable_params=lora_params(model, 8, ["q_proj", "v_proj"])
    )
    assert paths == ("model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.v_proj")
    assert lora_rank(model, job) == 8
    stack = make_stacks(model, job, Dtypes(4, 4, False, 4, True))[0]
    cost = layer_cost(stack.block, 4.0, accumulated=False, checkpointed=False)
    assert cost.params == 8 * ((64 + 64) + (64 + 32))
    everywhere = replace(job, adapted=None, trainable_params=lora_params(model, 8, "all-linear"))
    assert lora_rank(model, everywhere) == 8


def test_int8_holds_its_inputs_even_under_checkpointing() -> None:
    adapter = Dtypes(4, 4, False, 4, True)
    plain = layer_cost(block(adapter, rank=8), 4.0, accumulated=False, checkpointed=True)
    int8 = layer_cost(block(adapter, rank=8, quantization="int8"), 4.0, accumulated=False, checkpointed=True)
    # The inputs of attention, of its last product, of the feed-forward block and of its last product.
    assert (plain.held, int8.held) == (0, 2 * 16 * 4 * (3 * 64 + 160))


def test_liger_holds_no_logits_of_the_whole_batch() -> None:
    model = spec()
    d = Dtypes(2, 2, False)
    wide = make_block(model, d, model.layout, 64, 512, "sdpa")
    plain = head_cost(wide, model.head, "causal-lm", 2.0, False)
    liger = head_cost(replace(wide, liger=True), model.head, "causal-lm", 2.0, False)
    # 32768 tokens in chunks of 2048: a sixteenth of the vocabulary's width fits the hidden width.
    assert liger.forward == 2048 * 1000 * 2 + 64 * 512 * 64 * 2
    assert plain.forward == 64 * 512 * 1000 * (2 + 4 + 4)
    lean = layer_cost(replace(wide, liger=True), 2.0, accumulated=False, checkpointed=False)
    assert lean.saved < layer_cost(wide, 2.0, accumulated=False, checkpointed=False).saved


@pytest.mark.parametrize(
    ("d", "rows", "copies"),
    [
        (Dtypes(2, 2, True, 4), 64, 0),
        (Dtypes(2, 4, True, 4), 64, 1),  # the product of each chunk copies a frozen head
        (Dtypes(2, 4, True), 64, 2),  # autocast keeps the copy of a trained one, not that of its transpose
        (Dtypes(2, 4, True), 1, 1),  # of one chunk the first copy is gone before the second is made
        (Dtypes(4, 4, False), 64, 0),
    ],
)  # fmt: skip
def test_what_liger_holds_while_it_computes_the_loss(d: Dtypes, rows: int, copies: int) -> None:
    """Hidden states, logits of a chunk, and under autocast copies of what the two are made of."""
    model, length = spec(), 512 if rows == 64 else 1
    wide = replace(make_block(model, d, model.layout, rows, length, "sdpa"), liger=True)
    cost = head_cost(wide, model.head, "causal-lm", float(d.weight), False)
    chunk = 2048 if rows == 64 else 1
    copied_states = chunk * 64 * 2 if copies else 0
    assert cost.forward == rows * length * 64 * d.residual + chunk * 1000 * d.compute + copied_states
    assert cost.weights == copies * 2 * 64 * 1000


def test_liger_hands_on_the_gradients_of_its_forward_pass() -> None:
    """Nothing is made when the loss runs backwards, unless the head's gradient is kept in another dtype."""
    model, d = spec(), Dtypes(2, 2, False)
    wide = replace(make_block(model, d, model.layout, 64, 512, "sdpa"), liger=True)
    states, entries = 64 * 512 * 64 * 2, 64 * 1000
    cost = head_cost(wide, model.head, "causal-lm", 2.0, False)
    # Of the norm: its input and a float32 for each row. It writes its gradient over the one that it got.
    assert cost.saved == 2 * states + 4 * 64 * 512 + 2 * entries
    assert (cost.params, cost.peak.total) == (entries, cost.saved + 2)
    copied = head_cost(wide, model.head, "causal-lm", 4.0, False)
    assert copied.peak.total == cost.saved + 2 + 4 * entries


def test_keys_are_repeated_for_a_kernel_of_documents_without_groups() -> None:
    half, tokens, more = Dtypes(2, 2, False), 32, 64 - 32
    kept = [
        record(block(half, attention="varlen", grouped=grouped), counted=True)[0].saved()[0]
        for grouped in (True, False)
    ]
    assert kept[1] - kept[0] == 2 * 2 * tokens * more


def test_a_padded_batch_repeats_grouped_keys_and_makes_a_mask_in_each_layer() -> None:
    kept = [record(block(FLOAT, masked=masked), counted=True)[0].saved()[0] for masked in (False, True)]
    heads, length, tokens = 64, 16, 32
    assert kept[1] - kept[0] == 4 * tokens * (2 * (heads - 32) + length)


def test_kernels_before_ampere_and_of_32_bits_read_repeated_keys() -> None:
    half, tokens, more = Dtypes(2, 2, False), 32, 64 - 32
    kept = [record(block(half, grouped=grouped), counted=True)[0].saved()[0] for grouped in (True, False)]
    assert kept[1] - kept[0] == 2 * 2 * tokens * more
    wide = [
        record(block(Dtypes(4, 4, False), grouped=grouped), counted=True)[0].saved()[0]
        for grouped in (True, False)
    ]
    assert wide[0] == wide[1]


@pytest.mark.parametrize(
    ("optim", "copies"),
    [("adamw_torch", 1), ("adagrad", 2), ("sgd", 0), ("adamw_torch_fused", 0)],
)
def test_foreach_copies_all_values_on_cuda(optim: str, copies: int) -> None:
    model = spec()
    assert step_of(model, replace(JOB, optim=optim), A100) == 4 * copies * model.params


def test_a_cpu_copies_one_tensor_and_remembers_the_last() -> None:
    model = spec()
    embedding, largest = 1000 * 64, 64 * 160
    assert step_of(model, replace(JOB, optim="adamw_torch"), CPU) == 4 * 2 * embedding
    small = spec(vocab_size=100)
    job = replace(JOB, optim="adamw_torch", trainable_params=small.params)
    assert step_of(small, job, CPU) == 4 * 3 * largest
    half = replace(job, optim="adafactor", dtype="bfloat16", precision="bf16-true")
    assert step_of(small, half, CPU) == 4 * 5 * largest


def test_under_checkpointing_autocasts_copies_of_weights_end_with_the_forward_pass() -> None:
    job = replace(JOB, precision="bf16", checkpointing=True)
    phases = training_phases(spec(), job, CPU)
    copies = 2 * spec().linear_weights
    assert phases["forward"].temporary - phases["backward"].temporary >= copies // 2
    assert phases["forward"].activations == phases["backward"].activations
