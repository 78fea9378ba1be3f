"""Known failures of data: tokens, labels, batches, and how long training goes on over them."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

_GATE = "worker launcher.train.data.gate:check_first_batch"
_COLLATE = "worker launcher.train.data.batches:make_collator"

DATA = (
    Failure(
        id="pad-token-missing",
        title="tokenizer without a pad token",
        cause="Batches are padded with the pad token, and this tokenizer has none.",
        fix="set one: a reserved token of the vocabulary, otherwise unk, otherwise eos with labels made "
        "before padding",
        source="transformers/tokenization_utils_base.py _get_padding_truncation_strategies",
        places=("fix pad-token", "refusal pad-token-missing"),
        patterns=(
            r"Asking to pad but the tokenizer does not have a padding token",
            r"Cannot handle batch sizes > 1 if no padding token is defined",
        ),
    ),
    Failure(
        id="pad-is-eos",
        title="the pad token hides the end of the text",
        cause="If pad and eos are the same token, a collator that derives labels from ids masks every eos, "
        "and the model never learns to stop.",
        fix="create labels before padding, or use another pad token",
        source="huggingface/transformers#23530; huggingface/trl#976",
        places=("fix pad-token", _COLLATE, "refusal targets-lost", "refusal eos-masked"),
    ),
    Failure(
        id="truncation-silent",
        title="rows longer than the model or the limit",
        cause="Nothing is truncated unless requested, a tokenizer without a limit never truncates, and "
        "rotary models run past their positions without an error; or many tokens are truncated silently.",
        fix="set data.max_length, and data.overlong for longer rows",
        source="transformers/tokenization_utils_base.py model_max_length",
        places=("refusal too-much-truncated", "worker launcher.train.data.gate:check_truncation"),
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
        title="no target tokens",
        cause="The prompt mask or truncation at max_length removed all target tokens, so the loss is a mean "
        "over nothing: nan, which the Trainer logs as 0.0.",
        fix="raise data.max_length, or change data.loss_on; `effilaunch prepare RECIPE --show 3` shows the "
        "loss mask",
        source="transformers/trainer.py (logging_nan_inf_filter); torch.nn.functional.cross_entropy",
        places=("refusal no-targets", _GATE, "fix nan-shown-as-zero"),
        patterns=(r"no token of the first batch carries loss",),
        signs=(r"This instance will be ignored in loss calculation",),
    ),
    Failure(
        id="ragged-labels",
        title="rows or labels of unequal length in one batch",
        cause="The collator pads input_ids and attention_mask but not labels, or pads nothing, so no tensor "
        "can be created.",
        fix="pad labels too: use DataCollatorForSeq2Seq, or the prepared data",
        source="transformers/tokenization_utils_base.py convert_to_tensors; data/data_collator.py",
        places=(_COLLATE,),
        patterns=(
            r"features \(`\w+` in this case\) have excessive nesting",
            r"^(?:ValueError: )?expected sequence of length \d+ at dim \d+ \(got \d+\)",
            r"(?s)stack expects each tensor to be equal size.*"
            r"\n  File \S*(?:data_collator|_utils/collate)\.py",
        ),
    ),
    Failure(
        id="columns-removed",
        title="no column that the model accepts",
        cause="The Trainer drops every column that is not an argument of the model's forward; of raw text "
        "nothing remains.",
        fix="tokenise the rows first: set data.train[].format and columns",
        source="transformers/trainer.py _remove_unused_columns",
        places=("worker launcher.train.data.build:build_data",),
        patterns=(
            r"No columns in the dataset match the model's forward method signature",
            r"The batch received was empty, your model won't be able to train on it",
            r"Invalid key: \d+ is out of bounds for size 0",
        ),
    ),
    Failure(
        id="no-loss",
        title="the model returns no loss",
        cause="The batch has no labels, or the model was loaded without the head of its task.",
        fix="provide rows with targets and set the matching `task:`",
        source="transformers/trainer.py compute_loss",
        places=("worker launcher.train.model.models:auto_class", _GATE),
        patterns=(r"The model did not return a loss from the inputs",),
    ),
    Failure(
        id="iterable-max-steps",
        title="streamed data without max_steps",
        cause="The length of streamed data is unknown, so the learning-rate schedule has no length.",
        fix="set trainer.max_steps, or data.streaming: false",
        source="transformers/trainer.py set_initial_training_values",
        places=("refusal conflict",),
        patterns=(
            r"train_dataset does not implement __len__",
            r"Please specify `max_steps` in streaming mode",
        ),
        changes={"trainer.max_steps": 1000, "trainer.num_train_epochs": None},
    ),
    Failure(
        id="max-steps-wins",
        title="num_train_epochs is ignored",
        cause="With trainer.max_steps above 0 the Trainer ignores num_train_epochs and reports it only at "
        "level INFO.",
        fix="keep one of the two",
        source="transformers/trainer.py set_initial_training_values",
        places=("refusal conflict",),
        signs=(r"max_steps is given, it will override any value given in num_train_epochs",),
    ),
    Failure(
        id="zero-steps",
        title="the run trains no steps",
        cause="Fewer samples than one batch with dataloader_drop_last, or a stream that ends immediately. "
        "The Trainer warns and returns normally, or raises an error about a loader without a length.",
        fix="lower the batch size, provide more rows, or remove trainer.dataloader_drop_last",
        source="transformers/trainer.py (epoch_iterator)",
        places=("worker launcher.train.data.gate:check_steps", "refusal no-steps"),
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
        title="token id outside the embedding",
        cause="The tokenizer produces ids beyond the embedding: it belongs to another model, or tokens were "
        "added without resizing. A CPU raises IndexError, CUDA a device-side assert.",
        fix="use the model's own tokenizer, or list new tokens in model.add_tokens",
        source="torch.nn.functional.embedding; transformers resize_token_embeddings",
        places=("refusal token-id-range", "worker launcher.train.model.processing:fit_vocabulary"),
        patterns=(
            r"^(?:IndexError: )?index out of range in self$",
            r"Assertion `+srcIndex < srcSelectDimSize`+ failed",
            r"vectorized_gather_kernel.{0,200}Assertion `+ind >= ?0 && ind < ind_dim_size",
        ),
    ),
    Failure(
        id="label-out-of-range",
        title="label outside the range of classes",
        cause="A label is negative (other than -100) or not below the number of logits: num_labels is too "
        "small, labels start at 1, or token ids exceed the rows of the head.",
        fix="number the labels from 0; for tokens use the model's own tokenizer, or list new tokens in "
        "model.add_tokens",
        source="torch.nn.functional.cross_entropy; aten/src/ATen/native/cuda/Loss.cu",
        patterns=(
            r"Assertion `+(?:cur_target|t) >= 0 && (?:cur_target|t) < n_classes`+ failed",
            r"^(?:IndexError: )?Target -?\d+ is out of bounds\.",
        ),
    ),
    Failure(
        id="device-assert",
        title="CUDA device-side assert",
        cause="Usually an index out of range: a position, a gathered token, a mask. CUDA errors are "
        "asynchronous, so the traceback may not show the cause.",
        fix="run on the CPU, or with launch.env.CUDA_LAUNCH_BLOCKING: '1', to find the call; check token ids "
        "against the embedding size and sequence lengths against the model's positions",
        source="aten/src/ATen/native/cuda/IndexKernel.cu, ScatterGatherKernel.cu",
        patterns=(r"CUDA error: device-side assert triggered",),
        changes={"launch.env.CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Failure(
        id="illegal-access",
        title="CUDA illegal memory access",
        cause="A kernel accessed memory outside its tensors, or the GPU is faulty. CUDA errors are "
        "asynchronous, often raised by NCCL's watchdog, so the traceback may not show the cause.",
        fix="run with launch.env.CUDA_LAUNCH_BLOCKING: '1' and without compiled parts (paged optimizers, "
        "flash-attn, Liger, torch.compile); if the place varies, look for Xid errors (`dmesg | grep Xid`)",
        source="meta-pytorch/torchtune#1856; axolotl-ai-cloud/axolotl#1473",
        patterns=(
            r"CUDA error: an illegal memory access was encountered",
            r"CUDA error: (?:unspecified launch failure|misaligned address|uncorrectable ECC error)",
        ),
        changes={"launch.env.CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Failure(
        id="chat-template-missing",
        title="tokenizer without a chat template",
        cause="Conversations are formatted with the tokenizer's chat template, which base models usually "
        "lack.",
        fix="set model.chat_template to a file or to the template",
        source="transformers/tokenization_utils_base.py get_chat_template",
        places=("refusal chat-template-missing",),
        patterns=(
            r"tokenizer\.chat_template is not set",
            r"No chat template is set for this tokenizer",
        ),
    ),
    Failure(
        id="eval-without-dataset",
        title="evaluation without a dataset",
        cause="trainer.eval_strategy requests evaluation, but there is no evaluation set.",
        fix="add data.eval (for example {split: 0.02}), or set trainer.eval_strategy: 'no'",
        source="transformers/trainer.py Trainer.__init__",
        places=("refusal conflict",),
        patterns=(
            r"but you didn't pass an `eval_dataset` to `Trainer`",
            r"Trainer: evaluation requires an eval_dataset",
        ),
        changes={"data.eval": {"split": 0.02}},
    ),
)
