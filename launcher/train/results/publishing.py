"""Push a result to the hub with the login of this environment, which is checked before the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.train.checkpoint.pushing import NO_WEIGHTS
from launcher.train.model.processing import first_line


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository that may be written to."""

    id: str
    url: str
    private: bool

    def to_json(self) -> dict[str, Any]:
        return {"repo": self.id, "url": self.url, "private": self.private}


def reach_repository(name: str) -> Repository:
    """The repository; a new one is private, an existing one keeps its visibility.

    MachineError if the hub is unreachable or refuses this login; RecipeError for an invalid name.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise MachineError(
            Problem(
                "hub-offline",
                "HF_HUB_OFFLINE is set, so nothing can be pushed",
                hint="unset it, or merge without --push and push the folder later: `hf upload REPO FOLDER`",
            )
        )
    try:
        api = HfApi()  # with HF_TOKEN of the environment, or the login of this user
        made = api.create_repo(name, private=True, exist_ok=True)
        found = api.repo_info(made.repo_id)
    except Exception as error:
        raise _refusal(name, error) from error
    return Repository(made.repo_id, str(made), bool(found.private))


def _refusal(name: str, error: Exception) -> EffilaunchError:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    message = first_line(error)
    if isinstance(error, HFValidationError):
        hint = "use NAME or OWNER/NAME"
        return RecipeError(
            Problem("usage", f"--push {name} is not a valid repository name: {message}", hint=hint)
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
        hint = "set HF_TOKEN to a token that may write there, or log in with `hf auth login`"
        return MachineError(
            Problem("hub-login", f"the hub refuses write access to {name}: {message}", hint=hint)
        )
    if isinstance(error, (HfHubHTTPError, OSError)) or "connect" in message.lower():
        hint = "check the network; it is not needed without --push"
        return MachineError(Problem("hub-unreachable", f"{name} cannot be reached: {message}", hint=hint))
    return MachineError(
        Problem("hub-unreachable", f"{name} cannot be created: {type(error).__name__}: {message}")
    )


def send(folder: Path, repository: Repository, card: str | None = None) -> None:
    """Upload a model's folder, with `card` instead of its README.md. RunFailed if that fails."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        omitted = [*NO_WEIGHTS, *([] if card is None else ["README.md"])]
        api.upload_folder(
            repo_id=repository.id, folder_path=folder, commit_message="Upload model", ignore_patterns=omitted
        )
        if card is not None:
            api.upload_file(
                repo_id=repository.id,
                path_or_fileobj=card.encode(),
                path_in_repo="README.md",
                commit_message="Upload model card",
            )
    except Exception as error:
        raise RunFailed(
            Problem(
                "push-failed",
                f"the model was not pushed to {repository.id}: {first_line(error)}",
                file=str(folder),
                hint=f"it is complete in this folder: `hf upload {repository.id} {folder}` pushes it",
            )
        ) from error
