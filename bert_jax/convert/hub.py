"""Push exported folders to the Hugging Face Hub."""

import pathlib
from collections.abc import Mapping

from bert_jax.errors import UserError
from bert_jax.runtime.progress import Progress


def check(name: str) -> None:
    """Check the name and the token."""
    import huggingface_hub as hub
    from huggingface_hub import utils

    try:
        utils.validate_repo_id(name)
    except utils.HFValidationError as error:
        raise UserError(f"--push {name}: {error}") from None
    if name.count("/") != 1:
        raise UserError(f"--push {name}: give it as OWNER/MODEL, such as my-name/{name}")
    if hub.get_token() is None:
        raise UserError(
            f"cannot push to {name}: there is no token of the Hugging Face Hub; run `hf auth login` "
            "or set HF_TOKEN"
        )


def push(name: str, folders: Mapping[str, pathlib.Path], private: bool = False) -> str:
    """Commit a folder to each branch of a model repository, and return the repository's address.

    The repository and its branches are created if there are none. A branch gets one commit. Existing
    files that are not in the folder are kept.

    Args:
        name: OWNER/MODEL.
        folders: folder by name of the branch. They are pushed in this order.
        private: whether the repository is private.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors, utils

    utils.logging.set_verbosity_error()  # errors are reported below
    if Progress.is_quiet:
        utils.disable_progress_bars()
    api = hub.HfApi()
    branch = ""
    try:
        # None follows the default of the organization.
        url = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise UserError(
                f"{name} exists and is public: make it private in its settings on the Hub, or push "
                "without --private"
            )
        for branch, folder in folders.items():
            if branch != "main":
                api.create_branch(name, branch=branch, exist_ok=True)
            message = f"Export of {branch}" if branch != "main" else "Export of bert_jax"
            api.upload_folder(
                repo_id=name, folder_path=folder, revision=branch, commit_message=message
            )
        return str(url)
    except errors.HfHubHTTPError as error:
        problem = _refusal(error.response.status_code, name)
        problem += f" ({error.server_message or error})"
    except ValueError as error:  # the Hub's check of the card's metadata, or of a name
        problem = f"the Hub refuses it ({error}); see --license, --language and --revision"
    except Exception as error:
        if not is_network_error(error):
            raise
        problem = (
            f"it cannot be reached; check the network and HF_ENDPOINT, and try again ({error})"
        )
    where = f"{name}, branch {branch}," if branch else name
    raise UserError(
        f"cannot push to {where} on {constants.ENDPOINT}: {' '.join(problem.split())[:500]}"
    )


def is_network_error(error: Exception) -> bool:
    """Whether an exception of the Hub's client means that the Hub cannot be reached."""
    # Network exceptions of the client depend on its version's HTTP library.
    library = type(error).__module__.split(".")[0]
    return isinstance(error, OSError) or library.startswith(("httpx", "requests"))


def _refusal(status: int, name: str) -> str:
    owner = name.split("/")[0]
    if status == 401:
        return "the token is not valid: run `hf auth login` or set HF_TOKEN"
    if status in (403, 404):
        return (
            f"there is no {owner}, or the token may not write to it: choose another owner or a token "
            "with write access"
        )
    return f"the Hub answers with status {status}: try again later if it is not about the request"
