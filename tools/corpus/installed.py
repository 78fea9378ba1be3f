"""Scripts of other versions, missing packages, and files of a model that are not what they should be."""

from __future__ import annotations

from tools.corpus.capture import caused, main


@caused("training-args-gone", "evaluation-strategy")
def evaluation_strategy() -> None:
    from transformers import TrainingArguments

    TrainingArguments(output_dir="out", evaluation_strategy="epoch", learning_rate=2e-5)


@caused("training-args-gone", "parser", arguments=("--output_dir", "out", "--no_cuda", "--max_steps", "3"))
def parser() -> None:
    from transformers import HfArgumentParser, TrainingArguments

    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()


@caused("trainer-args-moved", "sft")
def sft_text_field() -> None:
    import tiny
    from transformers import TrainingArguments
    from trl import SFTTrainer

    SFTTrainer(
        model=tiny.model(),
        args=TrainingArguments("out"),
        train_dataset=[{"text": "w1 w2"}],
        dataset_text_field="text",
        max_seq_length=64,
    )


@caused("trainer-args-moved", "sft-config")
def sft_config_length() -> None:
    from trl import SFTConfig

    SFTConfig(output_dir="out", max_seq_length=512, packing=True)


@caused(
    "model-type-unknown", "new-model", files={"model/config.json": {"model_type": "llama9", "hidden_size": 8}}
)
def new_model() -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained("model")


@caused("model-type-unknown", "no-key", files={"model/config.json": {"hidden_size": 8}})
def no_model_type() -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained("model")


@caused(
    "remote-code",
    files={
        "model/config.json": {
            "model_type": "mine",
            "auto_map": {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"},
        },
        "model/mine.py": "class MineConfig: pass\n",
    },
)
def remote_code() -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained("model")


@caused("weights-file-broken", "pickle-pointer")
def pickle_pointer() -> None:
    from pathlib import Path

    import torch

    Path("pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\nsize 4943162240\n")
    torch.load("pytorch_model.bin")


@caused("weights-file-broken", "cut-pickle")
def cut_pickle() -> None:
    from pathlib import Path

    import torch

    torch.save({"w": torch.zeros(1000)}, "pytorch_model.bin")
    Path("pytorch_model.bin").write_bytes(Path("pytorch_model.bin").read_bytes()[:2000])
    torch.load("pytorch_model.bin")


@caused("label-out-of-range", "classes")
def label_of_a_class() -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32, num_labels=2))
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([2])).loss.backward()


@caused("triton-no-compiler", "cxx", env={"CXX": "/usr/bin/no-such-compiler"})
def compile_without_compiler() -> None:
    import tiny
    import torch

    model = torch.compile(tiny.model())
    model(input_ids=torch.tensor([[1, 2, 3]]))


@caused("tokenizer-packages", "llama", files={"model/tokenizer.model": "x" * 100})
def tokenizer_of_sentencepiece() -> None:
    from pathlib import Path

    from transformers import AutoTokenizer

    Path("model/config.json").write_text('{"model_type": "llama"}')
    Path("model/tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    AutoTokenizer.from_pretrained("model")


# Needs sentencepiece, protobuf and tiktoken; without them it causes the failure above.
@caused(
    "tokenizer-file-broken",
    "lfs-pointer",
    files={
        "model/tokenizer.model": "version https://git-lfs.github.com/spec/v1\noid sha256:9e55\nsize 499723\n"
    },
)
def tokenizer_file_of_git_lfs() -> None:
    from pathlib import Path

    from transformers import AutoTokenizer

    Path("model/config.json").write_text('{"model_type": "llama"}')
    Path("model/tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    AutoTokenizer.from_pretrained("model")


@caused(
    "dataset-script",
    files={"rows/rows.py": "import datasets\n\n\nclass Rows(datasets.GeneratorBasedBuilder):\n    pass\n"},
)
def dataset_script() -> None:
    from datasets import load_dataset

    load_dataset("rows")


if __name__ == "__main__":
    main()
