"""A result to the hub, by the login of this environment: asked for before the work, sent after it."""

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
    """The repository, made private where it does not exist; one that is there stays as visible as it is.

    MachineError where the hub is out of reach, or not with this login; RecipeError for an impossible name.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise MachineError(
            Problem(
                "hub-offline",
                "HF_HUB_OFFLINE is set, so nothing can be pushed",
                hint="unset it, or merge without --push and send the folder later: `hf upload REPO FOLDER`",
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

    said = first_line(error)
    if isinstance(error, HFValidationError):
        hint = "give it as NAME or OWNER/NAME"
        return RecipeError(Problem("usage", f"--push {name} is no name of a repository: {said}", hint=hint))
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
        hint = "set HF_TOKEN to a token that may write there, or log in with `hf auth login`"
        return MachineError(
            Problem("hub-login", f"the hub does not let you write to {name}: {said}", hint=hint)
        )
    if isinstance(error, (HfHubHTTPError, OSError)) or "connect" in said.lower():
        hint = "look at the network; without --push nothing of it is needed"
        return MachineError(Problem("hub-unreachable", f"{name} cannot be asked for: {said}", hint=hint))
    return MachineError(Problem("hub-unreachable", f"{name} cannot be made: {type(error).__name__}: {said}"))


def send(folder: Path, repository: Repository, card: str | None = None) -> None:
    """Upload a folder of a model; `card` in the place of a README.md that it may have.

    RunFailed where that fails: the folder is whole on this disk.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        left_out = [*NO_WEIGHTS, *([] if card is None else ["README.md"])]
        api.upload_folder(
            repo_id=repository.id, folder_path=folder, commit_message="Upload model", ignore_patterns=left_out
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
                hint=f"it is whole in this folder: `hf upload {repository.id} {folder}` sends it",
            )
        ) from error
