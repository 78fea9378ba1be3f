"""Known failures of quantised bases: bitsandbytes, its configuration, and where the weights are put."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

QUANTIZATION = (
    Failure(
        id="purely-quantized",
        title="a quantised model without an adapter",
        cause="int8 and 4-bit weights cannot be trained; the Trainer wants adapters on top of them.",
        fix="add `adapter: {type: lora}`, or drop `model.quantization`",
        source="transformers/trainer_utils.py validate_quantization_for_training",
        versions="transformers>=4.31",
        places=(Place("fix", "purely-quantized"), Place("diagnose")),
        patterns=(
            r"You cannot perform fine-tuning on purely quantized models",
            r"Training an 8-bit model is not supported yet",
        ),
        changes={"model.quantization": "none"},
    ),
    Failure(
        id="load-in-kwargs-removed",
        title="load_in_8bit and load_in_4bit are gone",
        cause="from_pretrained lost these arguments in transformers 5; a BitsAndBytesConfig says it now.",
        fix="say `model.quantization`, or pass quantization_config=BitsAndBytesConfig(...)",
        source="huggingface/transformers#41287",
        versions="transformers>=5",
        places=(Place("worker", "launcher.train.models:quantization_config"), Place("diagnose")),
        patterns=(r"got an unexpected keyword argument 'load_in_[48]bit'",),
    ),
    Failure(
        id="bnb-config-typo",
        title="a misspelt quantisation option",
        cause="BitsAndBytesConfig ignores keys that it does not know, so the model is loaded unquantised and "
        "nothing says so.",
        fix="say `model.quantization`; the run looks at the loaded model too",
        source="transformers/utils/quantization_config.py",
        places=(
            Place("refusal", "unknown-key"),
            Place("worker", "launcher.train.models:_check_quantized"),
            Place("diagnose"),
        ),
        patterns=(
            r"the model was loaded without (?:int8|nf4|fp4) quantisation",
            # Older versions name keys of their own here, of a configuration that they saved.
            r"Unused kwargs: \['(?!_load_in_|quant_method)\w+'.*BitsAndBytesConfig",
        ),
    ),
    Failure(
        id="bnb-both",
        title="8 and 4 bits at once",
        cause="load_in_8bit and load_in_4bit are both set.",
        fix="say one of them in `model.quantization`",
        source="transformers/utils/quantization_config.py",
        places=(Place("worker", "launcher.train.models:quantization_config"), Place("diagnose")),
        patterns=(r"load_in_4bit and load_in_8bit are both True",),
        changes={"model.quantization": "nf4"},
    ),
    Failure(
        id="bnb-defaults-slow",
        title="4 bits computed in fp32",
        cause="BitsAndBytesConfig's defaults are fp4 storage and products in fp32, the slowest and least "
        "exact of its choices.",
        fix="use nf4 with a 16-bit compute_dtype, as the plan does",
        source="bitsandbytes/nn/modules.py; transformers/utils/quantization_config.py",
        places=(Place("worker", "launcher.plan.decide:decide_weights"), Place("diagnose")),
        signs=(r"bnb_4bit_compute_d?type=torch\.float32 \(default\)",),
        changes={"model.quantization": "nf4"},
    ),
    Failure(
        id="bnb-bad-quant-type",
        title="a 4-bit type that does not exist",
        cause="bnb_4bit_quant_type is read only while the weights are converted, where the error ends up in "
        "a report of all tensors.",
        fix="use nf4 or fp4",
        source="bitsandbytes/functional.py",
        places=(Place("refusal", "wrong-choice"), Place("diagnose")),
        patterns=(
            r"quant_type must be 'nf4' or 'fp4'",
            r"4-bit quantization data type \w+ is not implemented",
        ),
        changes={"model.quantization": "nf4"},
    ),
    Failure(
        id="device-map-auto-distributed",
        title="device_map='auto' with several processes",
        cause="device_map spreads one process's layers over the devices, which the other processes also use.",
        fix="drop `model.device_map` (each rank then holds the model), or start one process",
        source="accelerate/accelerator.py prepare_model",
        places=(Place("fix", "device-map-distributed"), Place("diagnose")),
        patterns=(r"model that has been loaded with `device_map='auto'` in any distributed mode",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="tensors-on-two-gpus",
        title="one process used tensors of two GPUs",
        cause="The model is spread over several GPUs (device_map: auto) and labels, a mask or a module that "
        "was added later stayed on another one; or a script under a launcher moves something to cuda:0 on "
        "every rank.",
        fix="start one process a GPU, as `effilaunch run` does, without device_map, and let each use its "
        "own (LOCAL_RANK)",
        source="modelscope/ms-swift#7107, #2044",
        places=(Place("fix", "device-map-distributed"), Place("diagnose")),
        patterns=(
            r"Expected all tensors to be on the same device, but found at least two devices, cuda:\d+ and "
            r"cuda:\d+",
        ),
    ),
    Failure(
        id="kbit-wrong-device",
        title="a quantised model on another rank's device",
        cause="Every rank loaded its quantised weights onto the first GPU, where they have to stay.",
        fix="load them onto the rank's own device: device_map={'': LOCAL_RANK}",
        source="accelerate/accelerator.py prepare_model; transformers/integrations/accelerate.py",
        places=(Place("fix", "local-device-map"), Place("diagnose")),
        patterns=(r"in 8-bit(?: or 4-bit)? precision on a different device than the one",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="kbit-multi-device",
        title="a quantised model over several devices, in several processes",
        cause="A device_map split the weights over the devices, and more than one process was started.",
        fix="drop `model.device_map`, or start one process",
        source="accelerate/accelerator.py prepare_model",
        places=(Place("fix", "device-map-distributed"), Place("diagnose")),
        patterns=(r"in 8-bit(?: or 4-bit)? precision on multiple devices\b",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="kbit-cpu-offload",
        title="quantised weights that do not fit the GPU",
        cause="The device map put layers into the CPU's memory or on disk, because the GPUs cannot hold "
        "them; quantised layers cannot be trained there.",
        fix="use nf4 instead of int8, or more or larger GPUs",
        source="transformers/quantizers/quantizer_bnb_8bit.py; accelerate/accelerator.py prepare_model",
        places=(Place("worker", "launcher.train.models:_check_present"), Place("diagnose")),
        patterns=(
            r"Some modules are dispatched on the CPU or the disk",
            r"in 8-bit(?: or 4-bit)? precision with CPU or disk offload",
            r"the device map put \S+ and \d+ more out of the devices' memory",
        ),
        changes={"model.quantization": "nf4", "model.device_map": None},
    ),
    Failure(
        id="zero3-device-map",
        title="device_map under ZeRO-3",
        cause="ZeRO-3 places the weights itself and refuses any device_map.",
        fix="drop `model.device_map`",
        source="transformers/integrations/accelerate.py check_and_set_device_map",
        places=(
            Place("fix", "zero3-no-device-map"),
            Place("fix", "zero-device-map-asked"),
            Place("diagnose"),
        ),
        patterns=(r"DeepSpeed Zero-3 is not compatible with (?:`low_cpu_mem_usage|passing a)",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="zero3-int8",
        title="an int8 base under ZeRO-3",
        cause="ZeRO-3 cuts int8 weights into pieces; it has a history of stopping, and of losses ten times "
        "too high.",
        fix="use `sharding.zero_stage: 2`, or `model.quantization: nf4`",
        source="axolotl-ai-cloud/axolotl#2068; huggingface/accelerate#3730",
        places=(Place("fix", "zero3-int8"), Place("diagnose")),
        patterns=(r"Only Tensors of floating point and complex dtype can require gradients",),
        changes={"sharding.zero_stage": 2},
    ),
    Failure(
        id="zero3-4bit-load",
        title="ZeRO-3 loads a whole 4-bit model on every rank",
        cause="Quantised models are not partitioned while they are loaded: each GPU holds all of it once, "
        "and only then its share.",
        fix="make sure that the whole 4-bit model fits one GPU, or use a stage below 3",
        source="transformers/modeling_utils.py get_init_context",
        places=(Place("fix", "zero3-4bit-load"),),
        changes={"sharding.zero_stage": 2},
    ),
    Failure(
        id="fsdp-4bit-storage",
        title="4-bit weights that FSDP does not shard",
        cause="Their bytes are stored as uint8. FSDP2 leaves them out with a warning, so every rank holds "
        "all of them; FSDP1 ends with an error.",
        fix="set bnb_4bit_quant_storage to the compute dtype, or use DeepSpeed",
        source="accelerate/utils/fsdp_utils.py",
        places=(Place("refusal", "fsdp-quantized"), Place("diagnose")),
        patterns=(
            r"Cannot flatten integer dtype tensors",
            r"Must flatten tensors with uniform dtype but got .{0,80}torch\.u?int8",
        ),
        signs=(r"non-floating frozen Params4bit",),
        changes={"sharding.engine": "deepspeed"},
    ),
    Failure(
        id="bnb-no-backend",
        title="bitsandbytes has no kernels for this device",
        cause="None of the machine's devices is one that the installed bitsandbytes supports.",
        fix="install the bitsandbytes that supports it, or drop `model.quantization`",
        source="transformers/integrations/bitsandbytes.py; bitsandbytes/__init__.py",
        places=(Place("doctor", "bitsandbytes"), Place("diagnose")),
        patterns=(r"are supported by the bitsandbytes version you have installed",),
        changes={"model.quantization": "none"},
    ),
    Failure(
        id="bnb-cuda-binary",
        title="bitsandbytes has no binary for this CUDA",
        cause="Its compiled library for torch's CUDA is absent or cannot be loaded: another major version, "
        "BNB_CUDA_VERSION set to a wrong one, or a system library that is too old.",
        fix="install a bitsandbytes built for torch's CUDA and unset BNB_CUDA_VERSION; "
        "`effilaunch doctor` names both versions",
        source="bitsandbytes/cextension.py",
        places=(Place("doctor", "bitsandbytes"), Place("diagnose")),
        patterns=(
            r"Attempted to use bitsandbytes native library functionality but it's not available",
            r"(?:CUDA|ROCm) VERSION MISMATCH",
            r"CUDA Setup failed despite (?:GPU|CUDA) being available",
            r"Configured CUDA binary not found at ",
            r"Could not find the bitsandbytes CUDA binary",
            r"Could not load bitsandbytes native library",
            r"libbitsandbytes_\w{1,40}\.so: (?:cannot open shared object file|undefined symbol)",
            r"(?:'NoneType' object|module 'bitsandbytes\S*') has no attribute "
            r"'c(?:quantize|dequantize|gemm|igemm|adam|lion|get)\w*'",
            r"name 'str2optimizer\w+' is not defined",
        ),
    ),
    Failure(
        id="kbit-compile",
        title="torch.compile and a quantised base",
        cause="transformers refuses a quantised model that was compiled before the Trainer is built.",
        fix="leave compiling to `trainer.torch_compile`, or do without",
        source="transformers/trainer_utils.py validate_quantization_for_training",
        places=(Place("fix", "kbit-compile"), Place("diagnose")),
        patterns=(r"You cannot fine-tune quantized model with `torch\.compile\(\)`",),
        changes={"trainer.torch_compile": None},
    ),
    Failure(
        id="kbit-half",
        title="a quantised model was cast",
        cause="Code of yours, or a helper, called .half() or .float() on the model, which its packed weights "
        "do not survive.",
        fix="remove the call; `precision` decides the dtype of everything else",
        source="transformers/modeling_utils.py",
        places=(Place("diagnose"),),
        patterns=(r"`\.(?:half|float|to)(?:\(\))?` is not supported for (?:quantized model|`[48]-bit`)",),
    ),
    Failure(
        id="kbit-dataparallel",
        title="one GPU works, the others wait",
        cause="A plain `python` start with several visible GPUs would use nn.DataParallel, which the Trainer "
        "skips for quantised models.",
        fix="start one process per GPU: `launch.launcher: auto`",
        source="transformers/trainer.py _wrap_model",
        places=(
            Place("refusal", "launcher-conflict"),
            Place("worker", "launcher.plan.decide:decide_launcher"),
            Place("worker", "launcher.render.command:render_env"),
        ),
        changes={"launch.launcher": "auto"},
    ),
)
