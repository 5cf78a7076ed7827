"""Upload a folder to the Hugging Face hub as one commit."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the client's HTTP library, which differs between versions
)

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, ModelError

logger = log.get(__name__)


def upload_folder(
    folder: Path,
    repo_id: str,
    *,
    token: str | bool | None,
    private: bool | None,
    message: str,
    description: str | None = None,
    create_pr: bool = False,
    revision: str | None = None,
) -> str:
    """Create the repository if there is none, upload `folder`, and return the address of the commit."""
    api = HfApi(token=token or None)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            folder_path=folder, repo_id=repo, commit_message=message, commit_description=description,
            create_pr=create_pr, revision=revision,
        )  # fmt: skip
    except HFValidationError as err:
        raise ConfigError(f"{repo_id!r} is not the name of a hub repository.", fix="Use OWNER/NAME.") from err
    except HfHubHTTPError as err:
        reason = str(err).strip().partition("\n")[0]
        raise ModelError(
            f"Uploading to {repo_id} failed: {reason}",
            fix="Check the name, and that the token (token=, HF_TOKEN or `hf auth login`) may write there.",
        ) from err
    except (OSError, HTTPError) as err:
        raise ModelError(
            f"The hub cannot be reached to upload {repo_id}: {err}",
            fix="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or save to a folder and upload that later.",
        ) from err
    logger.info("uploaded to %s", commit.commit_url)
    return str(commit.commit_url)
