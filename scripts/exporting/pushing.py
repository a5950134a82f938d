"""Push an export to the Hugging Face Hub: access is checked before the work, and one commit adds all files or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from models.hub import unreachable
from utils.config.settings import UserError
from utils.config.spelling import reason_of

# Front matter that the Hub reads from a card: the library that loads the network, and the task.
FRONT_MATTER = """---
library_name: timm
pipeline_tag: image-classification
tags:
- image-classification
- timm
---
"""


class PushFailure(Exception):
    """The export exists, but not on the Hub; the message says what to repeat."""


def refuse_mistakes(repository: str) -> None:
    """Raise ``UserError`` if the name is wrong, the Hub is unreachable, or there is no valid token."""
    try:
        validate_repo_id(repository)
        named = repository.count("/") == 1
    except HFValidationError:
        named = False
    if not named:
        raise UserError(f"--push {repository}: write ORG/NAME, with letters, digits and -_.")
    if get_token() is None:
        raise UserError(f"--push {repository}: needs a token that may write; run 'hf auth login', or set HF_TOKEN")
    if why_not := unreachable(constants.ENDPOINT):
        raise UserError(f"--push {repository}: {why_not}; nothing was exported")
    try:
        HfApi().whoami()
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"--push {repository}: the token is not accepted ({_told(error)})") from error


def push(folder: Path, repository: str, private: bool) -> str:
    """Make the repository if it does not exist, commit the files of ``folder``, and return the commit's address.

    Files with other names stay; an existing repository stays public or private. Raises ``PushFailure``.
    """
    disable_progress_bars()
    api = HfApi(library_name="timm")
    again = f"the export in {folder} is whole; repeat 'hf upload {repository} {folder} .'"
    with _failing(f"the repository {repository} could not be made; {again} when it can"):
        api.create_repo(repository, private=private, exist_ok=True)
    with _failing(f"no file was added to {repository}, which exists now; {again}"):
        return api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add network").commit_url


@contextmanager
def _failing(said: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # errors of the network, the Hub, and the library that stores large files
        raise PushFailure(f"{said} ({_told(error)})") from error


def _told(error: Exception) -> str:
    """The error in one line, without the token, which a server may have sent back."""
    text = reason_of(error, with_file=True)
    token = get_token()
    return text.replace(token, "<token>") if token else text
