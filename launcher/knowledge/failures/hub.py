"""Known failures of loggers, the hub and its caches."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

_ENVIRONMENT = "worker launcher.execute.binding:fixed_environment"
_MODEL = "refusal model-missing"
_FULL = r"(?:No space left on device|Disk quota exceeded)"

HUB = (
    Failure(
        id="wandb-login",
        title="not logged in to wandb",
        cause="trainer.report_to includes wandb and this machine has no API key. Without a terminal the run "
        "stops; with one it waits for input.",
        fix="run `wandb login`, set WANDB_API_KEY, or log offline (launch.env.WANDB_MODE: offline)",
        source="wandb/sdk/lib/wbauth/authenticate.py",
        places=(_ENVIRONMENT, "doctor wandb"),
        patterns=(
            r"No API key configured\. Use `{1,2}wandb login`{1,2} to log in",
            r"api_key not configured \(no-tty\)",
            r"wandb\S*: .{0,80}user is not logged in",
        ),
        changes={"launch.env.WANDB_MODE": "offline"},
    ),
    Failure(
        id="wandb-unreachable",
        title="the wandb server does not respond",
        cause="No network, a missing proxy setting, or a server outage: wandb.init waits 90 seconds and then "
        "stops the run after the model was loaded.",
        fix="log offline (launch.env.WANDB_MODE: offline) and upload later with `wandb sync`, or correct "
        "WANDB_BASE_URL and the proxy",
        source="wandb/sdk/wandb_init.py",
        places=(_ENVIRONMENT, "worker launcher.train.tracking:attach_trackers", "doctor wandb"),
        patterns=(r"Timed out while retrying: \w+ \S+/graphql",),
        changes={"launch.env.WANDB_MODE": "offline"},
    ),
    Failure(
        id="wandb-disabled-gone",
        title="WANDB_DISABLED is no longer read",
        cause="transformers removed the variable, so a run with report_to: wandb logs to wandb although "
        "WANDB_DISABLED is set.",
        fix="set trainer.report_to: none",
        source="huggingface/transformers#41375",
        versions="transformers>=5",
        places=(_ENVIRONMENT, "doctor environment"),
        signs=(r"Using the `WANDB_DISABLED` environment variable is deprecated",),
        changes={"trainer.report_to": "none"},
    ),
    Failure(
        id="report-to-default",
        title="no tracker by default",
        cause="The default of report_to changed from `all` to `none`, so an unchanged script no longer logs.",
        fix="set the tracker: trainer.report_to: wandb",
        source="transformers/training_args.py report_to",
        versions="transformers>=5",
        places=("worker launcher.planner.arguments:decide_trainer",),
        signs=(r"The default value for the training argument `--report_to` will change",),
    ),
    Failure(
        id="report-to-unknown",
        title="unknown tracker",
        cause="The name in report_to is checked only when the Trainer is built, after the model is loaded.",
        fix="set trainer.report_to to one of the names in the message, or none",
        source="transformers/integrations/integration_utils.py get_reporting_integration_callbacks",
        places=("refusal wrong-choice",),
        patterns=(r"\b\w+ is not supported, only azure_ml, ",),
        changes={"trainer.report_to": "none"},
    ),
    Failure(
        id="hub-unreachable",
        title="the Hub is unreachable",
        cause="A file is not in the cache and could not be downloaded: no network, offline mode, or an error "
        "from the Hub.",
        fix="download model and data where there is a network (`effilaunch prepare RECIPE`, `hf download "
        "NAME`), or set model.name_or_path to a folder",
        source="transformers/utils/hub.py cached_files; huggingface_hub/file_download.py; datasets/load.py",
        places=(
            "refusal hub-unreachable",
            _MODEL,
            "refusal hub-offline",
            "refusal tokenizer-missing",
            "doctor hub",
        ),
        patterns=(
            r"We couldn't connect to 'https?://[^']+' to load",
            r"outgoing traffic has been disabled",
            r"Couldn't reach (?:'[^']+' on the Hub \(|the Hugging Face Hub for dataset|"
            r".{1,200}\((?:OfflineModeIsEnabled|ConnectionError|ConnectTimeout|ReadTimeout|LocalEntryNotFound))",
            r"Cannot reach https?://\S+: offline mode is enabled",
            r"\b50[0234] Server Error: .{0,80} for url: https?://(?:huggingface\.co|hf\.co)\b",
            r"There was a specific connection error when trying to load",
            r"HTTPSConnectionPool\(host='(?:huggingface|hf)\.co', port=443\): Max retries exceeded",
            r"we cannot find the requested files in the (?:disk cache|cached path|local cache)",
            r"An error happened while trying to locate the files? on the Hub,? and we cannot find the "
            r"(?:requested|appropriate)",
            # The client's own error, where nobody put it in other words.
            r"(?s)\b(?:Connect(?:ion)?Error|ConnectTimeout|ReadTimeout|MaxRetryError)\b.*"
            r"\n  File \S*huggingface_hub/",
        ),
    ),
    Failure(
        id="hub-gated",
        title="gated repository",
        cause="The repository is available only to accounts that accepted its terms, and no token of such an "
        "account was found.",
        fix="accept the terms on the repository's page, then set HF_TOKEN or run `hf auth login`",
        source="transformers/utils/hub.py cached_files; huggingface_hub/errors.py GatedRepoError",
        places=("refusal hub-gated", _MODEL, "refusal hub-data", "doctor gated"),
        patterns=(
            r"You are trying to access a gated repo",
            r"^(?:[\w.]+\.)?GatedRepoError: ",
            r"is a gated (?:repository|dataset on the Hub)",
            r"Cannot access gated repo for url",
            r"Access to (?:model|dataset) \S+ is restricted",
            r"is awaiting a review from the repo authors",
        ),
    ),
    Failure(
        id="hub-token",
        title="the Hub rejected the token",
        cause="The token in HF_TOKEN or from `hf auth login` is invalid, expired or revoked (401), or has no "
        "write access to this repository or organisation (403). An invalid token also blocks public "
        "downloads.",
        fix="set HF_TOKEN to a valid token, with write access to push (trainer.push_to_hub, "
        "trainer.hub_model_id), or unset it for public files (see `hf auth whoami`)",
        source="huggingface_hub/utils/_http.py hf_raise_for_status; huggingface/huggingface_hub#2002",
        places=("doctor hub",),
        patterns=(
            r"Invalid credentials in Authorization header",
            r"Invalid user token\b",
            # For a repository that is not there, or gated, the hub's client has errors of their own.
            r"\bHfHubHTTPError: 401 Client Error\b",
            r"\b401 Client Error: Unauthorized for url: https?://(?:huggingface\.co|hf\.co)/api/"
            r"(?:whoami|repos/)\S*(?:.{0,200}Invalid username or password)?",
            r"\b403 Client Error: Forbidden for url: https?://(?:huggingface\.co|hf\.co)/api/\S+",
            r"You don't have the rights to create a \w+ under the namespace",
            r"make sure you have a token with the `write` role",
            r"Token is required .{0,40}but no token found",
            r"\bUser Access Token .{1,80} is expired",
        ),
    ),
    Failure(
        id="hub-rate-limit",
        title="Hub rate limit exceeded",
        cause="The Hub limits requests per address or account in five minutes, and every rank, DataLoader "
        "worker and stream shard sends its own.",
        fix="download model and data once (`effilaunch prepare RECIPE`, `hf download NAME`) and train with "
        "HF_HUB_OFFLINE=1; HF_TOKEN raises the limit",
        source="huggingface_hub/utils/_http.py hf_raise_for_status; allenai/OLMo#550",
        patterns=(
            r"(?s)(?:There was a specific connection error when trying to load .{1,300}?)?"
            r"\b429 Client Error: Too Many Requests for (?:url|URL): https?://(?:huggingface\.co|hf\.co)\b",
            r"HTTP status client error \(429 Too Many Requests\)",
        ),
        changes={"launch.env.HF_HUB_OFFLINE": "1"},
    ),
    Failure(
        id="hub-bad-path",
        title="a path was taken for a repository name",
        cause="The folder does not exist, so its path was sent to the Hub as a repository name, which is "
        "invalid or not visible to this account.",
        fix="correct model.name_or_path (or the path of the adapter or dataset); relative paths are relative "
        "to the recipe",
        source="huggingface_hub/utils/_validators.py validate_repo_id",
        places=(
            "refusal model-config-missing",
            "refusal hub-model-absent",
            "refusal data-missing",
            "refusal adapter-missing",
        ),
        patterns=(
            r"Repo id must be in the form 'repo_name' or 'namespace/repo_name'",
            r"Repo id must use alphanumeric chars",
            r"Incorrect path_or_model_id: ",
            r"is not a local folder and is not a valid model identifier listed on",
            r"^(?:[\w.]+\.)?RepositoryNotFoundError: ",
            r"^(?:[\w.]+\.)?DatasetNotFoundError: Dataset .{1,200} doesn't exist on the Hub",
            r"Can't load (?:tokenizer|(?:the )?\w+) (?:for|of) '[^']+'\. If you were trying to load it from",
        ),
    ),
    Failure(
        id="cache-disk",
        title="no space for a cache",
        cause="Download, dataset and kernel caches are in the home folder by default, and its disk or quota "
        "is too small.",
        fix="set HF_HOME (models and datasets), TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR or "
        "TORCH_EXTENSIONS_DIR (compiled kernels) to a larger disk, or clean the cache that the error names",
        source="huggingface_hub/file_download.py _check_disk_space; triton/runtime/cache.py",
        places=("doctor caches",),
        patterns=(
            r"Not enough free disk space to download the file",
            # The path names a cache: of downloads, of prepared rows, or of compiled kernels.
            rf"(?m)^.*{_FULL}[^\n]{{0,60}}?['\"]?(?=/|\w:)(?![^'\"\n]*checkpoint-\d)[^'\"\n]*"
            r"(?:/\.cache/|/\.triton/|/huggingface/(?:hub|xet|datasets|modules)/|/(?:models|datasets)--|"
            r"/torchinductor_|/torch_extensions/|/triton/(?:cache|dump)/)",
            rf"(?s)^.*{_FULL}.*\n  File \S*\b"
            r"(?:huggingface_hub/(?:file_download|_snapshot_download|utils/_xet)|"
            r"triton/(?:runtime|compiler)/\w+|torch/_inductor/\S+|torch/utils/cpp_extension)\.py",
        ),
    ),
    Failure(
        id="remote-code",
        title="the model needs code from its repository",
        cause="transformers has no class for the model and would run Python code from the repository, which "
        "needs consent. Without a terminal it cannot ask.",
        fix="review the code, then set model.trust_remote_code: true and pin model.revision",
        source="transformers/dynamic_module_utils.py resolve_trust_remote_code",
        patterns=(
            r"contains custom code which must be executed to correctly load",
            r"Please pass the argument `trust_remote_code=True` to allow custom code",
            r"requires you to execute the \w+ file in that repo",
            r"Do you wish to run the custom code\?",
            # The question, asked where standard input is closed.
            r"(?s)^EOFError: EOF when reading a line\n.{0,600}? in resolve_trust_remote_code\b",
        ),
    ),
    Failure(
        id="dataset-script",
        title="the dataset is a script",
        cause="datasets 4 no longer runs dataset scripts.",
        fix="use a dataset of data files (Parquet, JSON lines), or its branch refs/convert/parquet",
        source="datasets/load.py",
        versions="datasets>=4",
        patterns=(r"Dataset scripts are no longer supported, but found",),
    ),
    Failure(
        id="weights-file-broken",
        title="truncated or invalid weights file",
        cause="The download was interrupted, the file is a git-lfs pointer of a few hundred bytes, or a full "
        "disk truncated a checkpoint.",
        fix="compare the file size with the Hub and download again (`hf download NAME --force-download`; "
        "`git lfs pull` in a clone)",
        source="safetensors; torch/serialization.py",
        patterns=(
            r"Error while deserializing header: ",
            r"SafetensorError: .{0,60}(?:HeaderToo(?:Large|Small)|InvalidHeader\w*|MetadataIncompleteBuffer)",
            # The first byte of a pointer, `version …`, or of a page of HTML.
            r"(?s)(?:Weights only load failed.*)?"
            r"(?:invalid load key, '[v<]'|Unsupported operand (?:118|60)\b)",
            r"PytorchStreamReader failed (?:reading|finding|locating)",
        ),
    ),
    Failure(
        id="cache-var-gone",
        title="TRANSFORMERS_CACHE is no longer read",
        cause="transformers removed the variable, so models are downloaded again into the home folder.",
        fix="set HF_HUB_CACHE (or HF_HOME) instead",
        source="huggingface_hub/constants.py HF_HUB_CACHE",
        versions="transformers>=5",
        places=(_ENVIRONMENT, "doctor environment"),
        signs=(r"Using `(?:TRANSFORMERS_CACHE|PYTORCH_\w+_CACHE)` is deprecated",),
    ),
)
