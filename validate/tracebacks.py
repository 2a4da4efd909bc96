"""Tracebacks for records: files are named by their place in a package, without the machine's folders."""

import sys
from pathlib import Path


def without_folders(text: str) -> str:
    """The text with each file named from the folder that Python imports it from.

    >>> without_folders(f'File "{Path(__file__).parent}/launch.py", line 1')
    'File "validate/launch.py", line 1'
    """
    roots = {str(Path(entry).absolute()) for entry in sys.path} | {str(Path(__file__).parents[1])}
    for root in sorted(roots - {"/"}, key=len, reverse=True):
        text = text.replace(f"{root}/", "")
    return text
