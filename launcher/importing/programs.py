"""Training programs that are known without their source: transformers' examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.importing.arguments import field_kind, field_names
from launcher.tasks import task_of_tool


@dataclass(frozen=True, slots=True)
class Program:
    """One of transformers' examples/pytorch scripts."""

    name: str
    flags: str
    """Its own flags beside those of all examples and of TrainingArguments, parted by spaces."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Recipe key -> what the script uses where the line is silent."""

    @property
    def task(self) -> str:
        """What it trains."""
        task = task_of_tool("transformers", self.name)
        assert task is not None, f"no task is known as {self.name}"
        return task.name

    def names(self) -> set[str]:
        """All its flags."""
        return {*_OF_ALL.split(), *self.flags.split(), *field_names()}

    def kind(self, flag: str) -> str | None:
        """How many words a flag takes; None for one that the script does not have."""
        if flag in _SWITCHES:
            return "switch"
        if flag in (*_OF_ALL.split(), *self.flags.split()):
            return "one"
        return field_kind(flag)


_OF_ALL = """model_name_or_path config_name tokenizer_name cache_dir use_fast_tokenizer model_revision token
    use_auth_token trust_remote_code dataset_name dataset_config_name train_file validation_file
    max_train_samples max_eval_samples overwrite_cache preprocessing_num_workers"""
_SWITCHES = (
    "use_fast_tokenizer", "use_auth_token", "trust_remote_code", "overwrite_cache", "streaming",
    "keep_linebreaks", "low_cpu_mem_usage", "pad_to_max_length", "ignore_mismatched_sizes", "do_regression",
    "shuffle_train_dataset", "resize_position_embeddings", "ignore_pad_token_for_loss",
)  # fmt: skip
_PAIRS = """source_prefix max_source_length max_target_length val_max_target_length num_beams
    pad_to_max_length ignore_pad_token_for_loss forced_bos_token max_predict_samples test_file"""
_CLASSES = "max_seq_length pad_to_max_length max_predict_samples test_file ignore_mismatched_sizes"
EXAMPLES: dict[str, Program] = {
    program.name: program
    for program in (
        Program("run_clm.py", """model_type config_overrides torch_dtype dtype
            low_cpu_mem_usage streaming block_size validation_split_percentage keep_linebreaks""",
                {"data.max_length": 1024, "data.packing": True}),
        Program("run_summarization.py", f"""{_PAIRS} lang text_column summary_column
            resize_position_embeddings""", {"data.max_length": 1024, "data.overlong": "truncate"}),
        Program("run_translation.py", f"{_PAIRS} source_lang target_lang",
                {"data.max_length": 1024, "data.overlong": "truncate"}),
        Program("run_glue.py", f"{_CLASSES} task_name",
                {"data.max_length": 128, "data.overlong": "truncate"}),
        Program("run_classification.py", f"""{_CLASSES} do_regression
            text_column_names text_column_delimiter train_split_name validation_split_name test_split_name
            remove_splits remove_columns label_column_name shuffle_train_dataset shuffle_seed metric_name""",
                {"data.max_length": 128, "data.overlong": "truncate"}),
        Program("run_image_classification.py", """model_type image_processor_name
            feature_extractor_name train_dir validation_dir train_val_split image_column_name
            label_column_name ignore_mismatched_sizes""",
                {"model.name_or_path": "google/vit-base-patch16-224-in21k"}),
    )
}  # fmt: skip
"""By the file's name (transformers 4 and 5)."""
