"""Names as people type them, and the names of a table that they stand for."""

import re


def words(name: str) -> tuple[str, ...]:
    """The letters, numbers and signs of a name in lower case; hyphens, underscores and spaces are left out.

    >>> words("Llama3.1-8B") == words("llama-3.1-8b") == ("llama", "3.1", "8", "b")
    True
    >>> words("gemma-29b") == words("gemma-2-9b")
    False
    """
    return tuple(re.findall(r"[a-z]+|[0-9]+(?:\.[0-9]+)*|[^\sa-z0-9_.-]", name.lower()))


def read_as(said: str, name: str) -> tuple[str, ...]:
    """A sentence that a name was read as another one; none if they differ in case and outer spaces only.

    >>> read_as("8xh100", "8xh100-sxm"), read_as("GPT2", "gpt2")
    (('8xh100 is read as 8xh100-sxm.',), ())
    """
    said = said.strip()
    return () if said.lower() == name.lower() else (f"{said} is read as {name}.",)
