"""Known failures of installed packages: other versions than a script was written for, and compiled parts."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

_KEYWORD = r"got an unexpected keyword argument '"
# Fields of TrainingArguments that transformers 5 does not have; eval_strategy is missing before 4.41.
GONE = (
    r"(?:evaluation_strategy|eval_strategy|no_cuda|use_mps_device|per_gpu_(?:train|eval)_batch_size|"
    r"overwrite_output_dir|logging_dir|fp16_backend|fp16_opt_level|half_precision_backend|"
    r"push_to_hub_(?:model_id|organization|token)|use_ipex|sharded_ddp|fsdp_min_num_params|"
    r"fsdp_transformer_layer_cls_to_wrap|tpu_metrics_debug|tpu_num_cores|torchdynamo|adafactor|"
    r"group_by_length|include_inputs_for_metrics|include_tokens_per_second|jit_mode_eval|dispatch_batches|"
    r"split_batches|save_safetensors|past_index|ray_scope|warmup_ratio|mp_parameters|xpu_backend|"
    r"evaluate_during_training)"
)
_TRL = r"(?:SFT|DPO|KTO|ORPO|CPO|GRPO|GKD|PPO|RLOO|BCO|XPO|PRM|Reward|OnlineDPO|NashMD|IterativeSFT)"

INSTALLATION = (
    Failure(
        id="training-args-gone",
        title="a field that this transformers' TrainingArguments do not have",
        cause="The name is misspelt, or the script was written for another transformers. Version 5 has "
        "removed or renamed about 35 fields: evaluation_strategy is eval_strategy, no_cuda is use_cpu, "
        "warmup_ratio is a fraction under warmup_steps; overwrite_output_dir, logging_dir and "
        "save_safetensors are gone.",
        fix="write the field's name as the installed version has it, or leave the field out",
        source="transformers/training_args.py",
        places=(Place("refusal", "renamed-key"), Place("refusal", "unknown-key"), Place("diagnose")),
        patterns=(
            rf"\b(?:Seq2Seq)?TrainingArguments(?:\.__init__)?\(\) {_KEYWORD}(?!gradient_checkpointing)\w+",
            rf"(?:\b\w{{1,80}}(?:\.__init__)?\(\) )?{_KEYWORD}{GONE}'",
            rf"(?:not used by the HfArgumentParser: \[|unrecognized arguments: ).{{0,400}}--{GONE}\b",
            rf"'(?:Seq2Seq)?TrainingArguments' object has no attribute '{GONE}'",
        ),
    ),
    Failure(
        id="trainer-args-moved",
        title="an argument that this Trainer does not take",
        cause="The name is misspelt, or the script was written for another transformers or trl: tokenizer is "
        "processing_class now; dataset_text_field, max_seq_length (max_length now), packing, beta and others "
        "of trl's trainers are fields of SFTConfig and DPOConfig.",
        fix="pass processing_class, and the others in the trainer's config",
        source="transformers/trainer.py; trl/trainer/sft_trainer.py; trl/trainer/sft_config.py",
        places=(Place("diagnose"),),
        patterns=(
            rf"\b(?:Seq2Seq|{_TRL})?Trainer(?:\.__init__)?\(\) {_KEYWORD}\w+",
            rf"\b{_TRL}Config(?:\.__init__)?\(\) {_KEYWORD}\w+",
            rf"__init__\(\) {_KEYWORD}(?:dataset_text_field|max_seq_length|processing_class)'",
        ),
    ),
    Failure(
        id="model-type-unknown",
        title="a model type that this transformers does not know",
        cause="The model is newer than the installed transformers, its code is in its repository, or its "
        "config.json names no model_type.",
        fix="update transformers; where the repository has the model's code, set "
        "model.trust_remote_code: true after reading it",
        source="transformers/models/auto/configuration_auto.py",
        places=(Place("diagnose"),),
        patterns=(
            r"but Transformers does not recognize this architecture",
            r"Unrecognized model in .{1,300}?\. Should have a `model_type` key",
            r"(?s)^KeyError: '[\w.-]+'\n(?:  File [^\n]*\n    [^\n]*\n|  File [^\n]*\n)?"
            r"  File \S*configuration_auto\.py",
        ),
    ),
    Failure(
        id="tokenizer-packages",
        title="a package that the tokenizer needs is missing or too old",
        cause="The repository has no tokenizer.json, so that the tokenizer is made from a SentencePiece "
        "or tiktoken file, which needs sentencepiece, protobuf or tiktoken.",
        fix="pip install --upgrade sentencepiece protobuf tiktoken",
        source="transformers/utils/import_utils.py; transformers/tokenization_utils_tokenizers.py",
        places=(Place("diagnose"),),
        patterns=(
            r"requires the (?:protobuf|SentencePiece|tiktoken) library but it was not found",
            r"[Yy]ou need to have sentencepiece (?:or tiktoken )?installed",
            r"make sure you have `sentencepiece` installed in order to use this tokenizer",
            r"`(?:tiktoken|sentencepiece|blobfile)` is required to read",
            r"No module named '(?:sentencepiece|tiktoken|google\.protobuf)'",
            # A protobuf that is too old for the file that it reads.
            r"cannot import name '\w+' from 'google\.protobuf(?:\.[\w.]+)?'",
        ),
    ),
    Failure(
        id="tokenizer-file-broken",
        title="a tokenizer file that cannot be read",
        cause="The repository has no tokenizer.json, and the file that the tokenizer is made from "
        "(tokenizer.model, spm.model, …) is missing, cut, or a Git LFS pointer. transformers 4 can raise the "
        "same error where sentencepiece or protobuf is not installed.",
        fix="download the tokenizer's files again (`hf download REPO`, or `git lfs pull` in a clone), and "
        "`pip install sentencepiece protobuf tiktoken`",
        source="transformers/convert_slow_tokenizer.py convert_slow_tokenizer; tiktoken/load.py; "
        "microsoft/DeBERTa#159",
        places=(Place("diagnose"),),
        patterns=(
            r"Converting from (?:SentencePiece and )?Tiktoken failed",
            # tiktoken reads it as a list of tokens and ranks.
            r"(?s)^ValueError: Error parsing line b.{0,4000}? in load_tiktoken_bpe\b",
        ),
    ),
    Failure(
        id="tokenizer-too-new",
        title="a tokenizer that is newer than the installed packages",
        cause="tokenizer.json, or the class that tokenizer_config.json names, was written by a newer "
        "tokenizers or transformers than the one that reads it.",
        fix="pip install -U tokenizers transformers",
        source="huggingface/transformers#31789; transformers/models/auto/tokenization_auto.py",
        places=(Place("diagnose"),),
        patterns=(
            r"data did not match any variant of untagged enum (?:ModelWrapper|Py\w+Wrapper)\b",
            r"Tokenizer class \w+ does not exist or is not currently imported",
        ),
    ),
    Failure(
        id="package-missing",
        title="a package that the run asks for is not installed, or is too old",
        cause="A quantisation, an attention kernel, an adapter or a loader needs a package that this "
        "environment does not have in the needed version.",
        fix="pip install -U the package that the error names, into the environment that runs the training; "
        "flash-attn can be left out with model.attn_implementation: sdpa",
        source="transformers/utils/import_utils.py; transformers/modeling_utils.py; "
        "hiyouga/LlamaFactory#3464",
        places=(Place("diagnose"),),
        patterns=(
            r"FlashAttention[23]? has been toggled on, but it cannot be used due to",
            r"Flash ?Attention is not available, but is needed",
            r"^(?:ImportError: )?Using .{1,100}? requires .{0,60}?(?:[Aa]ccelerate|bitsandbytes)\b",
            r"^(?:ModuleNotFoundError: )?No module named '(?:accelerate|bitsandbytes|datasets|deepspeed|"
            r"flash_attn|liger_kernel|peft|transformers|trl|xformers)'$",
        ),
    ),
    Failure(
        id="version-clash",
        title="installed packages that do not fit one another",
        cause="One package uses a name or a module that the installed version of another one does not have "
        "(or the script's own import is misspelt), or demands another version of it.",
        fix="install versions that fit: update both packages, or take those of the script's requirements; "
        "`pip check` lists what contradicts itself",
        source="huggingface/transformers#26065; huggingface/peft#917; transformers/utils/versions.py",
        places=(Place("diagnose"),),
        patterns=(
            r"cannot import name '\w+' from '(?:accelerate|bitsandbytes|datasets|deepspeed|huggingface_hub|"
            r"numpy|peft|tokenizers|torch|transformers|trl)(?:\.[\w.]+)?'",
            r"No module named '(?:torch\._six|(?:accelerate|datasets|deepspeed|huggingface_hub|peft|torch|"
            r"transformers|trl)\.[\w.]+)'",
            r"is required for a normal functioning of this module, but found",
            r"numpy\.dtype size changed, may indicate binary incompatibility",
        ),
    ),
    Failure(
        id="no-kernel-image",
        title="a package without machine code for this GPU",
        cause="torch, or a compiled package (bitsandbytes, flash-attn, xformers), was built without this "
        "GPU's compute capability: the GPU is newer than the package, or older than it supports.",
        fix="install the torch build of a CUDA that knows the GPU (torch.cuda.get_arch_list() names what it "
        "has), and reinstall the package that the innermost call of the traceback names",
        source="unslothai/unsloth#2946, #3833",
        places=(Place("diagnose"),),
        patterns=(
            r"no kernel image is available for execution on the device",
            r"CUDA error: invalid device function",
        ),
    ),
    Failure(
        id="driver-too-old",
        title="the NVIDIA driver is older than torch's CUDA",
        cause="torch was built for a CUDA that the installed driver does not serve.",
        fix="install a torch of the CUDA version that nvidia-smi shows (or of an older one), or update the "
        "driver",
        source="torch/cuda/__init__.py; IEIT-Yuan/Yuan-2.0#65",
        places=(Place("diagnose"),),
        patterns=(
            r"The NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient for CUDA runtime version",
        ),
    ),
    Failure(
        id="extension-abi",
        title="a compiled package that was built for another torch or CUDA",
        cause="A wheel (flash-attn, xformers, torchvision, …) holds machine code for one version of torch "
        "and its C++ ABI; torch was changed since, or the libraries of another CUDA are found first.",
        fix="reinstall that package for the installed torch (`pip install --force-reinstall --no-deps "
        "--no-build-isolation PACKAGE`), and unset LD_LIBRARY_PATH where it names another CUDA",
        source="Dao-AILab/flash-attention#931",
        places=(Place("diagnose"),),
        patterns=(
            r"\.so[.\d]*: undefined symbol: \w+",
            r"ImportError: lib(?:cudart|c10|torch|cublas|cusparse|cudnn|nvrtc)\w*\.so[.\d]*: cannot open "
            r"shared object file",
        ),
    ),
    Failure(
        id="glibc-too-old",
        title="a compiled package that needs a newer C library",
        cause="The wheel was built on a newer Linux than this one: its glibc or libstdc++ lacks a version "
        "that the wheel asks for.",
        fix="build the package here (`pip install --no-binary PACKAGE PACKAGE`), take an older wheel, or "
        "use a container of a newer Linux",
        source="Dao-AILab/flash-attention#1708",
        places=(Place("diagnose"),),
        patterns=(r"version `(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found",),
    ),
    Failure(
        id="triton-no-compiler",
        title="Triton or torch.compile found no compiler",
        cause="Both compile a small C or C++ file at the first step, which needs gcc, Python's headers and "
        "the driver's libcuda.so.",
        fix="install gcc or g++ and python3-dev, or set CC or CXX; without them train with "
        "trainer.torch_compile: false",
        source="triton/runtime/build.py; torch/_inductor/cpp_builder.py",
        places=(Place("doctor", "compiler"), Place("diagnose")),
        patterns=(
            r"Failed to find C compiler\. Please specify via CC",
            r"InvalidCxxCompiler: No working C\+\+ compiler found",
            r"fatal error: Python\.h: No such file or directory",
            r"libcuda\.so cannot found!",
            r"(?s)CalledProcessError: Command '?\[.{0,3000}?(?:-lcuda\b|triton).{0,3000}?returned non-zero",
        ),
    ),
    Failure(
        id="triton-compile",
        title="a Triton kernel does not compile for this GPU",
        cause="The kernel needs more shared memory or another instruction than the GPU has, or Triton's "
        "own compiler is older than the GPU or the package that calls it.",
        fix="use the Triton of the installed torch (`pip install --force-reinstall torch`), or train "
        "without the kernel (trainer.use_liger_kernel: false, trainer.torch_compile: false)",
        source="triton/compiler/errors.py; triton/runtime/errors.py",
        places=(Place("diagnose"),),
        patterns=(
            r"triton\.compiler\.(?:errors\.|code_generator\.)?(?:CompilationError|UnsupportedLanguageConstruct)",
            r"out of resource: shared memory, Required: \d+",
            # A notebook shows no module before the class.
            r"(?s)^CompilationError: at \d+:\d+:.*\n  File \S*[\\/]triton[\\/]",
            r"`ptxas` failed with error code|ptxas fatal\s*:",
            r"Internal Triton PTX codegen error|PTXASError: PTXAS error",
            r"RuntimeError: PassManager::run failed",
            r"Triton Error \[CUDA\]: device kernel image is invalid",
            r"TritonMissing: Cannot find a working triton installation",
            r"Triton Error \[CUDA\]: (?:device kernel image is invalid|no kernel image is available)",
        ),
    ),
    Failure(
        id="xformers-operator",
        title="xFormers has no kernel for these tensors",
        cause="xFormers was built without CUDA or for another GPU, or the dtype, the device or the head's "
        "width has no kernel.",
        fix="train with model.attn_implementation: sdpa, or install the xFormers of the installed torch",
        source="xformers/ops/fmha/dispatch.py",
        places=(Place("diagnose"),),
        patterns=(
            r"No operator found for `memory_efficient_attention_(?:forward|backward)`",
            r"xFormers wasn't build with CUDA support",
        ),
        changes={"model.attn_implementation": "sdpa"},
    ),
)
