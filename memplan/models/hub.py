"""A repository of the Hugging Face Hub: its config.json, by `huggingface_hub` where that is installed.

Nothing else is fetched, and nothing at all unless somebody names a repository.
"""

import re
from typing import TYPE_CHECKING, Final

from memplan.errors import InvalidValue
from memplan.models.config import config_file

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S: Final = 10
"""Seconds to wait for the Hub's answer."""


def is_repository(text: str) -> bool:
    """Whether a text has the form of a repository's name: an owner and a name.

    >>> is_repository("Qwen/Qwen3-8B"), is_repository("./Qwen3-8B"), is_repository("models/mine/config.json")
    (True, False, False)
    """
    part = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
    return re.fullmatch(f"{part}/{part}", text, flags=re.ASCII) is not None and not text.endswith(".json")


def hub_config(repository: str) -> "tuple[Path, str]":
    """The file of a repository's config.json, and its revision: from the Hub's cache, else from the Hub.

    Raises:
        InvalidValue: it can be read from neither; with the command that downloads it.
    """
    try:
        found = _cached(repository) or _downloaded(repository)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "huggingface_hub":
            raise
        raise _cannot_be_read(
            repository, "huggingface_hub is not installed: pip install huggingface_hub"
        ) from None
    file = config_file(found)
    return file, file.parent.name


def _cached(repository: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache  # slow to import, and rarely needed

    found = try_to_load_from_cache(repository, "config.json")
    return found if isinstance(found, str) else None


def _downloaded(repository: str) -> str:
    """The file, downloaded to the Hub's cache.

    The Hub is asked for its size first, once: `hf_hub_download` asks again and again for half a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repository, "config.json"), timeout=PATIENCE_S)
        return hf_hub_download(repository, "config.json")
    except Exception as error:  # of several libraries, by release: httpx, requests, huggingface_hub
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise _cannot_be_read(repository, why.rstrip(".")) from error


def _cannot_be_read(repository: str, why: str) -> InvalidValue:
    name = repository.rpartition("/")[2]
    return InvalidValue(
        f"{repository} is no preset and no path, and its config.json cannot be read from the Hugging Face "
        f"Hub ({why}); run `hf download {repository} config.json --local-dir {name}` where the Hub can be "
        f"reached, and use ./{name}."
    )
