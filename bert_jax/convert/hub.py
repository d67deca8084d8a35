"""Download models from the Hugging Face Hub, and push exported folders to it."""

import pathlib
from collections.abc import Mapping

from bert_jax.convert import sentence_encoder, weights
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.errors import UserError
from bert_jax.runtime.progress import Progress

# Files that are read besides the weights.
BESIDE_WEIGHTS = (
    *(*weights.CONFIGS, "vocab.txt", *vocabularies.FILES, sentence_encoder.MODULES),
    *(sentence_encoder.DEFAULTS, *sentence_encoder.CONFIGS, sentence_encoder.POOLING),
)


def download(name: str, revision: str | None, with_weights: bool) -> pathlib.Path:
    """Download a model, or find it in the local cache, and return its folder."""
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # errors are reported below
    try:
        info = hub.HfApi().model_info(name, revision=revision, timeout=20)
        available = {file.rfilename for file in info.siblings or []}

        def get(file: str) -> pathlib.Path:
            return pathlib.Path(hub.hf_hub_download(name, file, revision=revision))

        prefix = ""
        if sentence_encoder.MODULES in available:
            where = sentence_encoder.transformer_path(get(sentence_encoder.MODULES).parent)
            prefix = f"{where}/" if where else ""
        names = [f"{prefix}{x}" for x in (weights.WEIGHTS if with_weights else BESIDE_WEIGHTS)]
        first = next((file for file in names if file in available), None)
        if first is None:
            raise UserError(f"{name} on the hub has none of {', '.join(names)}")
        path = get(first)
        needed = {*BESIDE_WEIGHTS, *(f"{prefix}{file}" for file in BESIDE_WEIGHTS)} & available
        if first.endswith(".index.json"):
            needed |= {f"{prefix}{file}" for file in weights.shards(path)}
        for file in sorted(needed):
            get(file)
        return path.parents[1 if prefix else 0]
    except errors.GatedRepoError:
        problem = "the model is gated: accept its terms on the hub and run `hf auth login`"
    except errors.RevisionNotFoundError:
        problem = f"no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        problem = "no such local folder, and no such public model on the hub"
    except Exception as error:
        if not isinstance(error, errors.HFValidationError) and not is_network_error(error):
            raise
        try:
            cached = hub.snapshot_download(name, revision=revision, local_files_only=True)
            return pathlib.Path(cached)
        except Exception:
            raise UserError(
                f"{name} is not a local folder, and the Hugging Face Hub cannot be reached "
                f"({weights.one_line(error)[:200]}); download the model on a machine with network "
                "access and import its folder"
            ) from None
    raise UserError(f"cannot download {name}: {problem}")


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
