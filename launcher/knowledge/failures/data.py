"""Known failures of data: tokens, labels, batches, and how long training goes on over them."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

_GATE = Place("worker", "launcher.train.data.gate:check_first_batch")
_COLLATE = Place("worker", "launcher.train.data.collate:make_collator")

DATA = (
    Failure(
        id="pad-token-missing",
        title="a tokenizer without a pad token",
        cause="Rows of a batch are filled up with a pad token, and this tokenizer names none.",
        fix="name one: a reserved token of the vocabulary, else unk, else eos with labels made "
        "before padding",
        source="transformers/tokenization_utils_base.py _get_padding_truncation_strategies",
        places=(Place("fix", "pad-token"), Place("refusal", "pad-token-missing"), Place("diagnose")),
        patterns=(
            r"Asking to pad but the tokenizer does not have a padding token",
            r"Cannot handle batch sizes > 1 if no padding token is defined",
        ),
    ),
    Failure(
        id="pad-is-eos",
        title="a pad token that hides the end of a text",
        cause="Where pad and eos are one token, a collator that derives labels from ids masks every eos, "
        "and the model never learns to stop.",
        fix="make labels before padding, or give the tokenizer another pad token",
        source="huggingface/transformers#23530; huggingface/trl#976",
        places=(
            Place("fix", "pad-token"),
            _COLLATE,
            Place("refusal", "targets-lost"),
            Place("refusal", "eos-masked"),
        ),
    ),
    Failure(
        id="truncation-silent",
        title="rows longer than the model or the limit",
        cause="Nothing is cut unless asked, a tokenizer without a limit cuts nothing at all, and rotary "
        "models train past their positions without an error; or much is cut and nobody is told.",
        fix="set data.max_length, and data.overlong for what is longer",
        source="transformers/tokenization_utils_base.py model_max_length",
        places=(
            Place("refusal", "too-much-truncated"),
            Place("worker", "launcher.train.data.gate:check_truncation"),
            Place("diagnose"),
        ),
        # A model with a table of positions has no row for them; rotary ones say nothing.
        patterns=(
            r"(?s)^(?:IndexError: )?index out of range in self\n.*"
            r"(?:\bwpe|position_embeddings?|embed_positions)\(",
            r"(?s)^(?:RuntimeError: )?The expanded size of the tensor \(\d+\) must match the existing size.*"
            r"(?:position_ids|token_type_ids)\b.*\.expand\(",
        ),
        signs=(r"Token indices sequence length is longer than the specified maximum",),
    ),
    Failure(
        id="labels-all-masked",
        title="rows without anything to learn",
        cause="The prompt's mask or the cut at max_length removed every target, so the loss is a mean over "
        "nothing: nan, which the Trainer logs as 0.0.",
        fix="raise data.max_length, or change data.loss_on; `effilaunch prepare RECIPE --show 3` shows "
        "what is learnt",
        source="transformers/trainer.py (logging_nan_inf_filter); torch.nn.functional.cross_entropy",
        places=(Place("refusal", "no-targets"), _GATE, Place("fix", "nan-shown-as-zero"), Place("diagnose")),
        patterns=(r"no token of the first batch carries loss",),
        signs=(r"This instance will be ignored in loss calculation",),
    ),
    Failure(
        id="ragged-labels",
        title="rows or labels of unequal length in one batch",
        cause="The collator pads ids and attention mask and leaves the labels as they are, or pads nothing, "
        "so no tensor can be made of them.",
        fix="pad labels too: DataCollatorForSeq2Seq, as the prepared data does",
        source="transformers/tokenization_utils_base.py convert_to_tensors; data/data_collator.py",
        places=(_COLLATE, Place("diagnose")),
        patterns=(
            r"features \(`\w+` in this case\) have excessive nesting",
            r"^(?:ValueError: )?expected sequence of length \d+ at dim \d+ \(got \d+\)",
            r"(?s)stack expects each tensor to be equal size.*"
            r"\n  File \S*(?:data_collator|_utils/collate)\.py",
        ),
    ),
    Failure(
        id="columns-removed",
        title="no column that the model takes",
        cause="The Trainer drops every column that the model's forward does not name; of raw text nothing "
        "is left.",
        fix="tokenise the rows first: name their fields with data.train[].format and columns",
        source="transformers/trainer.py _remove_unused_columns",
        places=(Place("worker", "launcher.train.data.build:build_data"), Place("diagnose")),
        patterns=(
            r"No columns in the dataset match the model's forward method signature",
            r"The batch received was empty, your model won't be able to train on it",
            r"Invalid key: \d+ is out of bounds for size 0",
        ),
    ),
    Failure(
        id="no-loss",
        title="a model that returns no loss",
        cause="The batch has no labels, or the model was loaded without the head of its task, so there is "
        "nothing to go down.",
        fix="give rows with targets and the task that they are for (`task:`)",
        source="transformers/trainer.py compute_loss",
        places=(Place("worker", "launcher.train.models:auto_class"), _GATE, Place("diagnose")),
        patterns=(r"The model did not return a loss from the inputs",),
    ),
    Failure(
        id="iterable-max-steps",
        title="a stream without a number of steps",
        cause="The end of streamed rows is not known before it comes, so the learning rate has no length to "
        "be planned over.",
        fix="set trainer.max_steps, or data.streaming: false",
        source="transformers/trainer.py set_initial_training_values",
        places=(Place("refusal", "conflict"), Place("diagnose")),
        patterns=(
            r"train_dataset does not implement __len__",
            r"Please specify `max_steps` in streaming mode",
        ),
        changes={"trainer.max_steps": 1000, "trainer.num_train_epochs": None},
    ),
    Failure(
        id="max-steps-wins",
        title="epochs that are not counted",
        cause="With trainer.max_steps above 0 the Trainer ignores num_train_epochs and says so only in an "
        "info line.",
        fix="keep one of the two",
        source="transformers/trainer.py set_initial_training_values",
        places=(Place("refusal", "conflict"), Place("diagnose")),
        signs=(r"max_steps is given, it will override any value given in num_train_epochs",),
    ),
    Failure(
        id="zero-steps",
        title="a run that trains nothing",
        cause="Fewer samples than one batch with dataloader_drop_last, or a stream that ends at once. The "
        "Trainer warns and returns as if all were well, or speaks of a loader without a length.",
        fix="lower the batch size, give more rows, or drop trainer.dataloader_drop_last",
        source="transformers/trainer.py (epoch_iterator)",
        places=(
            Place("worker", "launcher.train.data.gate:check_steps"),
            Place("refusal", "no-steps"),
            Place("diagnose"),
        ),
        patterns=(
            r"There seems not to be a single sample in your epoch_iterator",
            # A loader of length 0 counts as one without a length; a stream is refused in other words before.
            r"args\.max_steps must be set to a positive value if dataloader does not have a length",
            r"Batch does not contain any data \(`None`\)\. At the end of all iterable data",
        ),
        changes={"trainer.dataloader_drop_last": False},
    ),
    Failure(
        id="token-id-range",
        title="a token id without a row in the embedding",
        cause="The tokenizer gives ids beyond the embedding: another model's tokenizer, or tokens that were "
        "added without resizing. A CPU raises IndexError, CUDA ends in a device-side assert.",
        fix="use the model's own tokenizer, or list new tokens under model.add_tokens",
        source="torch.nn.functional.embedding; transformers resize_token_embeddings",
        places=(
            Place("refusal", "token-id-range"),
            Place("worker", "launcher.train.tokens:fit_vocabulary"),
            Place("diagnose"),
        ),
        patterns=(
            r"^(?:IndexError: )?index out of range in self$",
            r"Assertion `+srcIndex < srcSelectDimSize`+ failed",
            r"vectorized_gather_kernel.{0,200}Assertion `+ind >= ?0 && ind < ind_dim_size",
        ),
    ),
    Failure(
        id="label-out-of-range",
        title="a label beyond the model's classes",
        cause="The loss got a label that is negative (other than -100) or not below the number of logits: "
        "too few num_labels, labels that begin at 1, or tokens beyond the head's rows.",
        fix="count the labels from 0; for tokens use the model's own tokenizer, or list new tokens under "
        "model.add_tokens",
        source="torch.nn.functional.cross_entropy; aten/src/ATen/native/cuda/Loss.cu",
        places=(Place("diagnose"),),
        patterns=(
            r"Assertion `+(?:cur_target|t) >= 0 && (?:cur_target|t) < n_classes`+ failed",
            r"^(?:IndexError: )?Target -?\d+ is out of bounds\.",
        ),
    ),
    Failure(
        id="device-assert",
        title="a CUDA kernel met a value that it refuses",
        cause="Mostly an index beyond a tensor: of a position, of a token whose probability is gathered, "
        "of a mask. The error is raised by a later call, so that the traceback need not show the place.",
        fix="run it on the CPU, or with launch.env.CUDA_LAUNCH_BLOCKING: '1', to see the call; compare "
        "token ids with the embedding's rows and the rows' length with the model's positions",
        source="aten/src/ATen/native/cuda/IndexKernel.cu, ScatterGatherKernel.cu",
        places=(Place("diagnose"),),
        patterns=(r"CUDA error: device-side assert triggered",),
        changes={"launch.env.CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Failure(
        id="illegal-access",
        title="a CUDA kernel left its memory",
        cause="A kernel read or wrote outside of its tensors, or the GPU is damaged. The error is raised by "
        "a later call, often by NCCL's watchdog, so that the traceback need not show the place.",
        fix="run with launch.env.CUDA_LAUNCH_BLOCKING: '1' to see the call, and without the compiled parts "
        "(paged optimizers, flash-attn, Liger, torch.compile); where it moves about, look for Xid errors "
        "(`dmesg | grep Xid`)",
        source="meta-pytorch/torchtune#1856; axolotl-ai-cloud/axolotl#1473",
        places=(Place("diagnose"),),
        patterns=(
            r"CUDA error: an illegal memory access was encountered",
            r"CUDA error: (?:unspecified launch failure|misaligned address|uncorrectable ECC error)",
        ),
        changes={"launch.env.CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Failure(
        id="chat-template-missing",
        title="a tokenizer without a chat template",
        cause="Conversations become text by the tokenizer's template, and a base model's tokenizer has none.",
        fix="give model.chat_template, a file or the template itself",
        source="transformers/tokenization_utils_base.py get_chat_template",
        places=(Place("refusal", "chat-template-missing"), Place("diagnose")),
        patterns=(
            r"tokenizer\.chat_template is not set",
            r"No chat template is set for this tokenizer",
        ),
    ),
    Failure(
        id="eval-without-dataset",
        title="evaluation without rows",
        cause="trainer.eval_strategy asks for evaluations, and there is no evaluation set.",
        fix="add data.eval (e.g. {split: 0.02}), or trainer.eval_strategy: 'no'",
        source="transformers/trainer.py Trainer.__init__",
        places=(Place("refusal", "conflict"), Place("diagnose")),
        patterns=(
            r"but you didn't pass an `eval_dataset` to `Trainer`",
            r"Trainer: evaluation requires an eval_dataset",
        ),
        changes={"data.eval": {"split": 0.02}},
    ),
)
