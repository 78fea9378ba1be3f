"""Known failures of adapters and of activation checkpointing."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

ADAPTERS = (
    Failure(
        id="no-grad-fn",
        title="the loss has no gradient path to a trainable parameter",
        cause="Reentrant checkpointing on a frozen base whose inputs require no gradient, or no trainable "
        "parameter at all (an adapter loaded for inference, everything frozen).",
        fix="use non-reentrant checkpointing, call enable_input_require_grads, and check that some "
        "parameters are trainable",
        source="transformers/modeling_utils.py enable_input_require_grads; huggingface/peft#1142",
        places=(
            "fix enable-input-require-grads",
            "fix non-reentrant-checkpointing",
            "worker launcher.train.model.adapters:require_input_grads",
        ),
        patterns=(r"element 0 of tensors does not require grad and does not have a grad_fn",),
        changes={"trainer.activation_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    Failure(
        id="adapter-not-trainable",
        title="no trainable parameters",
        cause="PeftModel.from_pretrained freezes the adapter unless is_trainable=True is passed, or every "
        "parameter was frozen.",
        fix="continue an adapter with `adapter.path`, which loads it for training",
        source="peft/peft_model.py from_pretrained(is_trainable=False)",
        places=("worker launcher.train.model.adapters:_continue_adapter", "refusal nothing-trainable"),
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
        title="DDP marked a parameter ready twice",
        cause="Reentrant checkpointing recomputes part of the graph, and with find_unused_parameters DDP "
        "marks those parameters ready a second time. The Trainer turns find_unused_parameters on for every "
        "PeftModel.",
        fix="use non-reentrant checkpointing and turn find_unused_parameters off",
        source="transformers/trainer.py _build_accelerator_args; huggingface/peft#301; huggingface/trl#4782",
        places=("fix ddp-find-unused", "fix non-reentrant-checkpointing", "fix ddp-ready-twice"),
        patterns=(r"Expected to mark a variable ready only once",),
        changes={
            "trainer.ddp_find_unused_parameters": False,
            "trainer.activation_checkpointing_kwargs": {"use_reentrant": False},
        },
    ),
    Failure(
        id="kbit-reentrant",
        title="reentrant checkpointing on a quantised base",
        cause="prepare_model_for_kbit_training enables checkpointing without use_reentrant, and torch "
        "defaults to reentrant. With several ranks, DDP then marks parameters ready twice.",
        fix="pass gradient_checkpointing_kwargs={'use_reentrant': False}",
        source="peft/utils/other.py prepare_model_for_kbit_training; torch/utils/checkpoint.py",
        places=("worker launcher.train.model.adapters:attach_adapter", "fix non-reentrant-checkpointing"),
        signs=(r"the use_reentrant parameter should be passed explicitly",),
        changes={"trainer.activation_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    Failure(
        id="ddp-unused-params",
        title="DDP waits for unused parameters",
        cause="Trainable parameters took no part in the forward pass (an adapter on an unused module, a "
        "second head), so their gradients never arrive, and find_unused_parameters is off.",
        fix="train only modules that the task uses, or turn find_unused_parameters on with non-reentrant "
        "checkpointing",
        source="torch/nn/parallel/distributed.py",
        patterns=(r"Expected to have finished reduction in the prior iteration",),
        changes={
            "trainer.ddp_find_unused_parameters": True,
            "trainer.activation_checkpointing_kwargs": {"use_reentrant": False},
        },
    ),
    Failure(
        id="use-cache-checkpointing",
        title="KV cache during activation checkpointing",
        cause="A KV cache is useless in training. transformers turns it off with a warning, and the Trainer "
        "leaves use_cache: false in the saved configuration.",
        fix="nothing to do: the plan turns it off and restores the saved configuration",
        source="transformers/trainer.py (model.config.use_cache = args.use_cache)",
        versions="transformers>=5",
        places=("fix use-cache-off", "worker launcher.train.outcome:save_outcome"),
        signs=(r"`use_cache=True` is incompatible with (?:gradient|activation) checkpointing",),
        changes={"trainer.use_cache": False},
    ),
    Failure(
        id="checkpointing-renamed",
        title="gradient_checkpointing is now activation_checkpointing",
        cause="transformers 5 renamed the field and its kwargs; transformers 6 removes the old names.",
        fix="write `trainer.activation_checkpointing`",
        source="transformers/training_args.py",
        versions="transformers>=5",
        places=("refusal renamed-key",),
        patterns=(
            r"unexpected keyword argument 'gradient_checkpointing(?:_kwargs)?'",
            # A warning that was made an error: it has calls below it.
            r"(?s)^FutureWarning: `gradient_checkpointing(?:_kwargs)?` is deprecated and will be.*\n  File ",
        ),
        signs=(r"`gradient_checkpointing(?:_kwargs)?` is deprecated and will be",),
    ),
    Failure(
        id="checkpointing-unsupported",
        title="the model does not support activation checkpointing",
        cause="The model class does not implement activation checkpointing.",
        fix="set `trainer.activation_checkpointing: false` and use a smaller micro-batch",
        source="transformers/modeling_utils.py supports_gradient_checkpointing",
        places=("refusal checkpointing-unsupported",),
        patterns=(
            r"\b\w+ does not support (?:activation|gradient) checkpointing\.",
            r"\b\w+ is not compatible with gradient checkpointing",
        ),
        changes={"trainer.activation_checkpointing": False},
    ),
    Failure(
        id="recompute-differs",
        title="recomputed tensors differ from the saved ones",
        cause="Non-reentrant checkpointing compares saved and recomputed tensors, and they differ. Under "
        "ZeRO-3 the recomputed weights are sharded (shape [0]); otherwise a cache, randomness or autocast "
        "differed between the passes.",
        fix="under ZeRO-3 set trainer.activation_checkpointing_kwargs: {use_reentrant: true} or "
        "sharding.zero_stage: 2; otherwise turn use_cache off and use the same autocast in both passes",
        source="torch/utils/checkpoint.py check_recomputed_tensors_match; huggingface/trl#2514, #5217",
        patterns=(
            r"Recomputed values for the following tensors have different metadata",
            r"A different number of tensors was saved during the original forward and recomputation",
        ),
    ),
    Failure(
        id="checkpointing-kwarg-typo",
        title="unknown key in activation_checkpointing_kwargs",
        cause="Only torch validates activation_checkpointing_kwargs, in the first forward pass.",
        fix="use use_reentrant, preserve_rng_state, determinism_check, debug, early_stop, context_fn, "
        "every_n_layers or offload",
        source="torch/utils/checkpoint.py",
        places=("refusal unknown-key",),
        patterns=(
            r"ValueError: Unexpected keyword arguments: \w+",
            r"^Unexpected keyword arguments: [\w,]+$",
        ),
        changes={"trainer.activation_checkpointing_kwargs": None},
    ),
    Failure(
        id="fsdp-double-checkpointing",
        title="FSDP and the Trainer both enable checkpointing",
        cause="activation_checkpointing is on in the FSDP config and in TrainingArguments; the Trainer "
        "refuses that.",
        fix="enable one of them. accelerate's FSDP version recomputes with different dropout masks: with "
        "dropout, keep the Trainer's",
        source="transformers/trainer.py",
        places=("refusal owned-key",),
        patterns=(
            r"can't both be set to True\. Use FSDP's activation",
            r"activation_checkpointing in FSDP config and the gradient_checkpointing in training arg",
        ),
        changes={"trainer.activation_checkpointing": False},
    ),
    Failure(
        id="kbit-fp32-upcast",
        title="prepare_model_for_kbit_training on an unquantised base",
        cause="It casts every 16-bit parameter to fp32: embeddings and head of a quantised model, but all "
        "weights of an unquantised one, which doubles its memory.",
        fix="call it for quantised bases only; otherwise freeze the base and call enable_input_require_grads",
        source="peft/utils/other.py prepare_model_for_kbit_training; huggingface/peft#816, #1149",
        places=("fix no-kbit-prepare-on-16-bit", "fix kbit-prepare"),
    ),
    Failure(
        id="target-modules-missing",
        title="target_modules not found in the model",
        cause="No module matches `adapter.target_modules`; the names belong to another architecture.",
        fix="set `adapter.target_modules: all-linear`, or the layer names of this model",
        source="peft/tuners/tuners_utils.py inject_adapter",
        places=("refusal no-target-modules", "refusal target-modules-missing"),
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
        cause="peft raises an error only if no name matches. Other unmatched names are ignored silently, so "
        "fewer layers are trained than requested.",
        fix="use module names that the model has",
        source="peft/tuners/tuners_utils.py inject_adapter",
        places=("worker launcher.train.model.adapters:check_names", "refusal target-modules-missing"),
    ),
    Failure(
        id="target-modules-none",
        title="no default target_modules for this architecture",
        cause="Without target_modules, peft uses a table of architectures, which does not include this one.",
        fix="set `adapter.target_modules: all-linear`",
        source="peft/tuners/lora/model.py",
        places=("worker launcher.planner.record:_record_adapter",),
        patterns=(r"Please specify `target_modules`",),
        changes={"adapter.target_modules": "all-linear"},
    ),
    Failure(
        id="modules-to-save-typo",
        title="modules_to_save match nothing",
        cause="peft ignores names in modules_to_save that no module has, so those modules are neither "
        "trained nor saved.",
        fix="use module names that the model has",
        source="peft/tuners/tuners_utils.py",
        places=("worker launcher.train.model.adapters:check_names", "refusal target-modules-missing"),
    ),
    Failure(
        id="lora-bad-values",
        title="invalid LoRA settings",
        cause="A rank below 1, an unknown task type, or a field that LoraConfig does not have.",
        fix="correct the value under `adapter:`",
        source="peft/tuners/lora/layer.py; peft/config.py",
        places=("refusal wrong-value", "refusal unknown-key", "refusal bad-adapter"),
        patterns=(
            r"`r` should be a positive integer value",
            r"Invalid task type: '",
            r"(?:LoraConfig|PeftConfig\w*)(?:\.__init__)?\(\) got an unexpected keyword argument",
            r"(?s)__init__\(\) got an unexpected keyword argument.*\n  File \S*peft/config\.py",
        ),
    ),
    Failure(
        id="resized-embeddings-lost",
        title="embeddings of added tokens are missing in the adapter",
        cause="The vocabulary was resized for LoRA training, and peft did not save the embeddings because it "
        "could not detect the change. The adapter no longer fits the base model.",
        fix="list new tokens in `model.add_tokens`: their embedding rows are trained and saved",
        source="peft/utils/save_and_load.py save_embedding_layers; huggingface/peft#1300, #1457, #2898",
        places=("worker launcher.train.model.processing:train_added_rows", "refusal adapter-mismatch"),
        patterns=(
            r"size mismatch for base_model\.model\.[\w.]*?"
            r"(?:embed_tokens|embed_in|embed_out|lm_head|wte|word_embeddings|shared)[\w.]*: copying a param",
        ),
        signs=(r"will assume that the vocabulary was not modified",),
    ),
    Failure(
        id="tied-weights-adapter",
        title="tied embedding and head are trained separately",
        cause="modules_to_save copies the embedding or the head of a model that ties both. The copies "
        "diverge unless peft is told to keep them tied.",
        fix="nothing to do: the run sets ensure_weight_tying where needed",
        source="peft/utils/other.py ensure_weight_tying",
        places=(
            "worker launcher.train.model.adapters:_keep_tied",
            "worker launcher.train.model.processing:train_added_rows",
        ),
        # A warning that was made an error: it has calls below it.
        patterns=(r"(?s)^UserWarning: .*`ensure_weight_tying` is not set to True.*\n  File ",),
        signs=(r"`ensure_weight_tying` is not set to True",),
        changes={"adapter.ensure_weight_tying": True},
    ),
    Failure(
        id="double-peft",
        title="adapter on top of an adapter",
        cause="A new LoRA is added to a model that already has one, for example because the model folder is "
        "an adapter.",
        fix="set the base model in `model.name_or_path` and the adapter to continue in `adapter.path`",
        source="peft/mapping_func.py get_peft_model",
        places=("refusal conflict", "refusal double-peft"),
        patterns=(
            r"You are trying to modify a model with PEFT for a second time",
            r"You passed a `PeftModel` instance together with a `peft_config`",
        ),
    ),
    Failure(
        id="modules-to-save-ddp",
        title="modules_to_save under DDP",
        cause="The frozen original beside each trained copy used to count as an unused parameter.",
        fix="nothing to do",
        source="huggingface/peft#899",
        places=("none peft freezes the original, and two ranks train without an error today",),
    ),
)
