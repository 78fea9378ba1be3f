"""Known failures of loggers, the hub and its caches."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

_ENVIRONMENT = Place("worker", "launcher.execute.binding:fixed_environment")
_MODEL = Place("refusal", "model-missing")
_FULL = r"(?:No space left on device|Disk quota exceeded)"

HUB = (
    Failure(
        id="wandb-login",
        title="wandb without a login",
        cause="trainer.report_to names wandb and this machine has no key for it: without a terminal it "
        "stops, with one it waits for an answer.",
        fix="run `wandb login`, set WANDB_API_KEY, or log offline (launch.env.WANDB_MODE: offline)",
        source="wandb/sdk/lib/wbauth/authenticate.py",
        places=(_ENVIRONMENT, Place("doctor", "wandb"), Place("diagnose")),
        patterns=(
            r"No API key configured\. Use `{1,2}wandb login`{1,2} to log in",
            r"api_key not configured \(no-tty\)",
            r"wandb\S*: .{0,80}user is not logged in",
        ),
        changes={"launch.env.WANDB_MODE": "offline"},
    ),
    Failure(
        id="wandb-unreachable",
        title="wandb's server does not answer",
        cause="No network, a proxy that is not set, or a server that is down: wandb.init waits for 90 "
        "seconds, then its error ends the run, whose model is loaded by then.",
        fix="log offline (launch.env.WANDB_MODE: offline) and send it later with `wandb sync`, or see to "
        "WANDB_BASE_URL and the proxy",
        source="wandb/sdk/wandb_init.py",
        places=(
            _ENVIRONMENT,
            Place("worker", "launcher.train.tracking:attach_trackers"),
            Place("doctor", "wandb"),
            Place("diagnose"),
        ),
        patterns=(r"Timed out while retrying: \w+ \S+/graphql",),
        changes={"launch.env.WANDB_MODE": "offline"},
    ),
    Failure(
        id="wandb-disabled-gone",
        title="WANDB_DISABLED is no longer read",
        cause="transformers dropped the variable: a run that reports to wandb does so although "
        "WANDB_DISABLED is set.",
        fix="write trainer.report_to: none",
        source="huggingface/transformers#41375",
        versions="transformers>=5",
        places=(
            _ENVIRONMENT,
            Place("doctor", "environment"),
            Place("diagnose"),
        ),
        signs=(r"Using the `WANDB_DISABLED` environment variable is deprecated",),
        changes={"trainer.report_to": "none"},
    ),
    Failure(
        id="report-to-default",
        title="no tracker by default",
        cause="report_to was `all` and is now `none`, so the same script no longer logs anywhere.",
        fix="name the tracker: trainer.report_to: wandb",
        source="transformers/training_args.py report_to",
        versions="transformers>=5",
        places=(Place("worker", "launcher.plan.arguments:decide_trainer"), Place("diagnose")),
        signs=(r"The default value for the training argument `--report_to` will change",),
    ),
    Failure(
        id="report-to-unknown",
        title="a tracker that transformers does not know",
        cause="The name under report_to is looked up only when the Trainer is built, after the model "
        "is loaded.",
        fix="write trainer.report_to as one of the names that the message lists, or none",
        source="transformers/integrations/integration_utils.py get_reporting_integration_callbacks",
        places=(Place("refusal", "wrong-choice"), Place("diagnose")),
        patterns=(r"\b\w+ is not supported, only azure_ml, ",),
        changes={"trainer.report_to": "none"},
    ),
    Failure(
        id="hub-unreachable",
        title="the hub cannot be reached",
        cause="A file is neither in the cache nor could it be fetched: no network, offline mode, or the hub "
        "answered with an error.",
        fix="fetch model and data where there is a network (`effilaunch prepare RECIPE`, "
        "`hf download NAME`), or name a folder under model.name_or_path",
        source="transformers/utils/hub.py cached_files; huggingface_hub/file_download.py; datasets/load.py",
        places=(
            Place("refusal", "hub-unreachable"),
            _MODEL,
            Place("refusal", "hub-offline"),
            Place("refusal", "tokenizer-missing"),
            Place("doctor", "hub"),
            Place("diagnose"),
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
        title="a gated repository",
        cause="The repository gives its files only to accounts that accepted its terms, and no such "
        "account's token is here.",
        fix="accept the terms on the repository's page, then set HF_TOKEN or run `hf auth login`",
        source="transformers/utils/hub.py cached_files; huggingface_hub/errors.py GatedRepoError",
        places=(
            Place("refusal", "hub-gated"),
            _MODEL,
            Place("refusal", "hub-data"),
            Place("doctor", "gated"),
            Place("diagnose"),
        ),
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
        title="the hub does not accept the token",
        cause="The token in HF_TOKEN, or the one that `hf auth login` stored, is wrong, expired or revoked "
        "(401), or it may not write to this repository or organisation (403). A wrong token also stops "
        "downloads that need none.",
        fix="set HF_TOKEN to a valid token, with write access where the run pushes "
        "(trainer.push_to_hub, trainer.hub_model_id), or unset it for public files (see `hf auth whoami`)",
        source="huggingface_hub/utils/_http.py hf_raise_for_status; huggingface/huggingface_hub#2002",
        places=(Place("doctor", "hub"), Place("diagnose")),
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
        title="too many requests to the hub",
        cause="The hub answers only so many requests of one address or account in five minutes, and every "
        "rank, data worker and shard of a stream asks by itself.",
        fix="fetch model and data once (`effilaunch prepare RECIPE`, `hf download NAME`) and train with "
        "HF_HUB_OFFLINE=1; set HF_TOKEN, whose limit is higher",
        source="huggingface_hub/utils/_http.py hf_raise_for_status; allenai/OLMo#550",
        places=(Place("diagnose"),),
        patterns=(
            r"(?s)(?:There was a specific connection error when trying to load .{1,300}?)?"
            r"\b429 Client Error: Too Many Requests for (?:url|URL): https?://(?:huggingface\.co|hf\.co)\b",
            r"HTTP status client error \(429 Too Many Requests\)",
        ),
        changes={"launch.env.HF_HUB_OFFLINE": "1"},
    ),
    Failure(
        id="hub-bad-path",
        title="a path that was taken for a repository",
        cause="The folder does not exist where the run looked, so its path went to the hub as a repository's "
        "name: it cannot be one, or no repository that this account may see has it.",
        fix="correct model.name_or_path (or the adapter's or data set's path); relative paths are relative "
        "to the recipe",
        source="huggingface_hub/utils/_validators.py validate_repo_id",
        places=(
            Place("refusal", "model-config-missing"),
            Place("refusal", "hub-model-absent"),
            Place("refusal", "data-missing"),
            Place("refusal", "adapter-missing"),
            Place("diagnose"),
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
        title="no room in a cache",
        cause="Caches of downloads, prepared rows and compiled kernels are under the home folder unless set "
        "otherwise. Its disk, or the account's quota, is smaller than the file.",
        fix="set HF_HOME (models and data sets), TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR or "
        "TORCH_EXTENSIONS_DIR (compiled kernels) to a folder on a larger disk, or remove old files from the "
        "cache that the error names",
        source="huggingface_hub/file_download.py _check_disk_space; triton/runtime/cache.py",
        places=(Place("doctor", "caches"), Place("diagnose")),
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
        title="a model whose code is in its repository",
        cause="transformers has no class for the model: it would run Python files of the repository, and "
        "asks for consent. Without a terminal there is nobody who could answer.",
        fix="read the files; then set model.trust_remote_code: true, with model.revision so that they "
        "stay those",
        source="transformers/dynamic_module_utils.py resolve_trust_remote_code",
        places=(Place("diagnose"),),
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
        title="a data set that is a script",
        cause="datasets 4 no longer runs the Python file of a repository that makes its rows.",
        fix="take a data set of files (Parquet, JSON lines), or its branch refs/convert/parquet",
        source="datasets/load.py",
        versions="datasets>=4",
        places=(Place("diagnose"),),
        patterns=(r"Dataset scripts are no longer supported, but found",),
    ),
    Failure(
        id="weights-file-broken",
        title="a file of weights that is cut or none",
        cause="The download was interrupted, or git was used without git-lfs and the file is a pointer of "
        "some hundred bytes; a full disk cuts a checkpoint.",
        fix="compare the file's size with the hub's and fetch it again (`hf download NAME "
        "--force-download`; `git lfs pull` in a clone)",
        source="safetensors; torch/serialization.py",
        places=(Place("diagnose"),),
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
        cause="The variable was dropped, so models are fetched again into the home folder.",
        fix="set HF_HUB_CACHE (or HF_HOME) in its place",
        source="huggingface_hub/constants.py HF_HUB_CACHE",
        versions="transformers>=5",
        places=(
            _ENVIRONMENT,
            Place("doctor", "environment"),
            Place("diagnose"),
        ),
        signs=(r"Using `(?:TRANSFORMERS_CACHE|PYTORCH_\w+_CACHE)` is deprecated",),
    ),
)
