"""Known failures of adapters and of activation checkpointing."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

ADAPTERS = (
    Failure(
        id="no-grad-fn",
        title="the loss has no way back to a trained weight",
        cause="Reentrant checkpointing over a frozen base whose inputs require no gradient, or no trained "
        "parameter at all: an adapter loaded for inference, everything frozen.",
        fix="use non-reentrant checkpointing and let the inputs require gradients; check that anything is "
        "trained",
        source="transformers/modeling_utils.py enable_input_require_grads; huggingface/peft#1142",
        places=(
            Place("fix", "enable-input-require-grads"),
            Place("fix", "non-reentrant-checkpointing"),
            Place("worker", "launcher.train.adapters:require_input_grads"),
            Place("diagnose"),
        ),
        patterns=(r"element 0 of tensors does not require grad and does not have a grad_fn",),
        changes={"trainer.activation_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    Failure(
        id="adapter-not-trainable",
        title="nothing is trained",
        cause="PeftModel.from_pretrained loads an adapter frozen unless it is told is_trainable=True; or "
        "every parameter was frozen.",
        fix="continue an adapter with `adapter.path`, which loads it for training",
        source="peft/peft_model.py from_pretrained(is_trainable=False)",
        places=(
            Place("worker", "launcher.train.adapters:_continue_adapter"),
            Place("refusal", "nothing-trainable"),
            Place("diagnose"),
        ),
        patterns=(
            r"trainable params: 0 \|\| all params",
            r"no parameter would be trained",
            r"DistributedDataParallel is not needed when a module doesn't have any parameter that requires",
            # The line of code below the call tells that what was sought is what can be trained.
            r"(?s)optimizer got an empty parameter list.*requires_grad",
        ),
    ),
    Failure(
        id="ddp-ready-twice",
        title="DDP saw a parameter's gradient twice",
        cause="Reentrant checkpointing computes a part of the graph again, and DDP's search for unused "
        "parameters then marks its parameters ready a second time. The Trainer turns the search on for "
        "every PeftModel.",
        fix="use non-reentrant checkpointing and turn the search off",
        source="transformers/trainer.py _build_accelerator_args; huggingface/peft#301; huggingface/trl#4782",
        places=(
            Place("fix", "ddp-find-unused"),
            Place("fix", "non-reentrant-checkpointing"),
            Place("fix", "ddp-ready-twice"),
            Place("diagnose"),
        ),
        patterns=(r"Expected to mark a variable ready only once",),
        changes={
            "trainer.ddp_find_unused_parameters": False,
            "trainer.activation_checkpointing_kwargs": {"use_reentrant": False},
        },
    ),
    Failure(
        id="kbit-reentrant",
        title="reentrant checkpointing under a quantised base",
        cause="prepare_model_for_kbit_training switches checkpointing on without saying which kind, and "
        "torch takes the reentrant one; over several ranks that marks parameters ready twice.",
        fix="hand it gradient_checkpointing_kwargs={'use_reentrant': False}",
        source="peft/utils/other.py prepare_model_for_kbit_training; torch/utils/checkpoint.py",
        places=(
            Place("worker", "launcher.train.adapters:attach_adapter"),
            Place("fix", "non-reentrant-checkpointing"),
            Place("diagnose"),
        ),
        signs=(r"the use_reentrant parameter should be passed explicitly",),
        changes={"trainer.activation_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    Failure(
        id="ddp-unused-params",
        title="DDP waited for parameters that were not used",
        cause="Trained parameters took no part in the forward pass (an adapter on an unused module, a second "
        "head), so their gradients never came, and DDP was told not to search for them.",
        fix="train only modules that the task uses, or let DDP search, with non-reentrant checkpointing",
        source="torch/nn/parallel/distributed.py",
        places=(Place("diagnose"),),
        patterns=(r"Expected to have finished reduction in the prior iteration",),
        changes={
            "trainer.ddp_find_unused_parameters": True,
            "trainer.activation_checkpointing_kwargs": {"use_reentrant": False},
        },
    ),
    Failure(
        id="use-cache-checkpointing",
        title="a KV cache while layers are recomputed",
        cause="A cache makes no sense in training; transformers turns it off with a warning, and the Trainer "
        "leaves use_cache false in the configuration that it saves.",
        fix="nothing: the plan turns it off and the saved configuration gets it back",
        source="transformers/trainer.py (model.config.use_cache = args.use_cache)",
        versions="transformers>=5",
        places=(
            Place("fix", "use-cache-off"),
            Place("worker", "launcher.train.outcome:save_outcome"),
            Place("diagnose"),
        ),
        signs=(r"`use_cache=True` is incompatible with (?:gradient|activation) checkpointing",),
        changes={"trainer.use_cache": False},
    ),
    Failure(
        id="checkpointing-renamed",
        title="gradient_checkpointing is called activation_checkpointing now",
        cause="transformers 5 renamed the field and its kwargs; version 6 will not know the old names.",
        fix="write `trainer.activation_checkpointing`",
        source="transformers/training_args.py",
        versions="transformers>=5",
        places=(Place("refusal", "renamed-key"), Place("diagnose")),
        patterns=(
            r"unexpected keyword argument 'gradient_checkpointing(?:_kwargs)?'",
            # A warning that was made an error: it has calls below it.
            r"(?s)^FutureWarning: `gradient_checkpointing(?:_kwargs)?` is deprecated and will be.*\n  File ",
        ),
        signs=(r"`gradient_checkpointing(?:_kwargs)?` is deprecated and will be",),
    ),
    Failure(
        id="checkpointing-unsupported",
        title="a model that cannot recompute its layers",
        cause="The model's class does not support activation checkpointing.",
        fix="set `trainer.activation_checkpointing: false` and take a smaller micro-batch",
        source="transformers/modeling_utils.py supports_gradient_checkpointing",
        places=(Place("refusal", "checkpointing-unsupported"), Place("diagnose")),
        patterns=(
            r"\b\w+ does not support (?:activation|gradient) checkpointing\.",
            r"\b\w+ is not compatible with gradient checkpointing",
        ),
        changes={"trainer.activation_checkpointing": False},
    ),
    Failure(
        id="recompute-differs",
        title="a layer was recomputed into other tensors",
        cause="Non-reentrant checkpointing compares what a layer saves with what it recomputes, and the two "
        "differ: under ZeRO-3 the recomputed weights are sharded (shape [0]); elsewhere a cache, a random "
        "choice or autocast was another one the second time.",
        fix="under ZeRO-3 set trainer.activation_checkpointing_kwargs: {use_reentrant: true}, or train with "
        "sharding.zero_stage: 2; elsewhere keep use_cache off and autocast around both passes",
        source="torch/utils/checkpoint.py check_recomputed_tensors_match; huggingface/trl#2514, #5217",
        places=(Place("diagnose"),),
        patterns=(
            r"Recomputed values for the following tensors have different metadata",
            r"A different number of tensors was saved during the original forward and recomputation",
        ),
    ),
    Failure(
        id="checkpointing-kwarg-typo",
        title="an unknown option of checkpointing",
        cause="Only torch reads activation_checkpointing_kwargs, in the first forward pass.",
        fix="use use_reentrant, preserve_rng_state, determinism_check, debug, early_stop, context_fn, "
        "every_n_layers or offload",
        source="torch/utils/checkpoint.py",
        places=(Place("refusal", "unknown-key"), Place("diagnose")),
        patterns=(
            r"ValueError: Unexpected keyword arguments: \w+",
            r"^Unexpected keyword arguments: [\w,]+$",
        ),
        changes={"trainer.activation_checkpointing_kwargs": None},
    ),
    Failure(
        id="fsdp-double-checkpointing",
        title="FSDP's checkpointing and the Trainer's at once",
        cause="Both switches are on; the Trainer refuses.",
        fix="switch one of them off; accelerate's for FSDP recomputes with other dropout masks, so with "
        "dropout keep the Trainer's",
        source="transformers/trainer.py",
        places=(Place("refusal", "owned-key"), Place("diagnose")),
        patterns=(
            r"can't both be set to True\. Use FSDP's activation",
            r"activation_checkpointing in FSDP config and the gradient_checkpointing in training arg",
        ),
        changes={"trainer.activation_checkpointing": False},
    ),
    Failure(
        id="kbit-fp32-upcast",
        title="prepare_model_for_kbit_training on an unquantised base",
        cause="It casts every 16-bit parameter to fp32: embeddings and head of a quantised model, all of an "
        "unquantised one, whose memory doubles.",
        fix="call it for quantised bases only; elsewhere freeze the base and let the inputs require grad",
        source="peft/utils/other.py prepare_model_for_kbit_training; huggingface/peft#816, #1149",
        places=(Place("fix", "no-kbit-prepare-on-16-bit"), Place("fix", "kbit-prepare")),
    ),
    Failure(
        id="target-modules-missing",
        title="target_modules that the model does not have",
        cause="No module of the model has the names, or matches the pattern, under `adapter.target_modules`: "
        "they belong to another architecture.",
        fix="use `adapter.target_modules: all-linear`, or the names of this model's layers",
        source="peft/tuners/tuners_utils.py inject_adapter",
        places=(
            Place("refusal", "no-target-modules"),
            Place("refusal", "target-modules-missing"),
            Place("diagnose"),
        ),
        patterns=(
            r"(?s)Target modules .{1,12000}? not found in the base model",
            r"No modules were targeted for adaptation",
            r"the model has no module '[^']*'; its linear layers are",
        ),
        changes={"adapter.target_modules": "all-linear"},
    ),
    Failure(
        id="target-modules-partial",
        title="some target_modules match nothing",
        cause="peft raises only when none of the names matches; the others are left out in silence, and less "
        "is trained than asked for.",
        fix="use names that the model has",
        source="peft/tuners/tuners_utils.py inject_adapter",
        places=(
            Place("worker", "launcher.train.adapters:check_names"),
            Place("refusal", "target-modules-missing"),
        ),
    ),
    Failure(
        id="target-modules-none",
        title="peft knows no target_modules for this architecture",
        cause="Without target_modules peft looks the architecture up in a table, and this one is not in it.",
        fix="use `adapter.target_modules: all-linear`",
        source="peft/tuners/lora/model.py",
        places=(Place("worker", "launcher.plan.record:_record_adapter"), Place("diagnose")),
        patterns=(r"Please specify `target_modules`",),
        changes={"adapter.target_modules": "all-linear"},
    ),
    Failure(
        id="modules-to-save-typo",
        title="modules_to_save that match nothing",
        cause="peft ignores names under modules_to_save that no module has; nothing of them is trained or "
        "saved.",
        fix="use names that the model has",
        source="peft/tuners/tuners_utils.py",
        places=(
            Place("worker", "launcher.train.adapters:check_names"),
            Place("refusal", "target-modules-missing"),
        ),
    ),
    Failure(
        id="lora-bad-values",
        title="LoRA settings that peft refuses",
        cause="A rank below 1, a task type or a field that LoraConfig does not have.",
        fix="correct the value under `adapter:`",
        source="peft/tuners/lora/layer.py; peft/config.py",
        places=(
            Place("refusal", "wrong-value"),
            Place("refusal", "unknown-key"),
            Place("refusal", "bad-adapter"),
            Place("diagnose"),
        ),
        patterns=(
            r"`r` should be a positive integer value",
            r"Invalid task type: '",
            r"(?:LoraConfig|PeftConfig\w*)(?:\.__init__)?\(\) got an unexpected keyword argument",
            r"(?s)__init__\(\) got an unexpected keyword argument.*\n  File \S*peft/config\.py",
        ),
    ),
    Failure(
        id="resized-embeddings-lost",
        title="the embeddings of added tokens are not in the adapter",
        cause="The vocabulary was resized under LoRA, and peft saved no embeddings because it could not see "
        "that they had changed; the adapter no longer fits the base model.",
        fix="name the new tokens in `model.add_tokens`: their rows are trained and saved",
        source="peft/utils/save_and_load.py save_embedding_layers; huggingface/peft#1300, #1457, #2898",
        places=(
            Place("worker", "launcher.train.tokens:train_added_rows"),
            Place("refusal", "adapter-mismatch"),
            Place("diagnose"),
        ),
        patterns=(
            r"size mismatch for base_model\.model\.[\w.]*?"
            r"(?:embed_tokens|embed_in|embed_out|lm_head|wte|word_embeddings|shared)[\w.]*: copying a param",
        ),
        signs=(r"will assume that the vocabulary was not modified",),
    ),
    Failure(
        id="tied-weights-adapter",
        title="a tied embedding and head became two",
        cause="modules_to_save copies the embedding, or the head, of a model that has one matrix for both; "
        "they are trained apart unless peft is told to keep them tied.",
        fix="nothing: the run sets ensure_weight_tying where it is needed",
        source="peft/utils/other.py ensure_weight_tying",
        places=(
            Place("worker", "launcher.train.adapters:_keep_tied"),
            Place("worker", "launcher.train.tokens:train_added_rows"),
            Place("diagnose"),
        ),
        # A warning that was made an error: it has calls below it.
        patterns=(r"(?s)^UserWarning: .*`ensure_weight_tying` is not set to True.*\n  File ",),
        signs=(r"`ensure_weight_tying` is not set to True",),
        changes={"adapter.ensure_weight_tying": True},
    ),
    Failure(
        id="double-peft",
        title="an adapter on top of an adapter",
        cause="A new LoRA is put on a model that has one already, e.g. because the model's folder is that of "
        "an adapter.",
        fix="name the base model in `model.name_or_path`, and the adapter to continue in `adapter.path`",
        source="peft/mapping_func.py get_peft_model",
        places=(Place("refusal", "conflict"), Place("refusal", "double-peft"), Place("diagnose")),
        patterns=(
            r"You are trying to modify a model with PEFT for a second time",
            r"You passed a `PeftModel` instance together with a `peft_config`",
        ),
    ),
    Failure(
        id="modules-to-save-ddp",
        title="modules_to_save under DDP",
        cause="The untrained original beside a trained copy used to count as an unused parameter.",
        fix="nothing",
        source="huggingface/peft#899",
        places=(Place("none", "peft freezes the original, and two ranks train without an error today"),),
    ),
)
