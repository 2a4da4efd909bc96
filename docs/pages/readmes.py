"""Chapters of the READMEs as pages, so that no page repeats what a README says."""

import re
from functools import partial
from typing import Final

from pages.records import ROOT

CHAPTERS: Final = {
    "README.md": {"what-can-be-planned": "reference/planned", "how-far-to-trust-it": "validation/summary"},
    "memplan/README.md": {
        "does-it-fit": "concepts/verdicts",
        "how-it-works": "concepts/design",
        "times": "concepts/times",
        "how-a-search-works": "concepts/searching",
        "models-and-clusters": "reference/names",
        "your-own-module": "concepts/traces",
        "what-options-mean": "reference/options",
        "what-should-i-run": "concepts/commands",
        "from-a-plan-to-a-run": "concepts/launchers",
        "megatron": "concepts/megatron",
    },
    "validate/README.md": {
        "predicted-and-measured": "validation/quick",
        "how-far-to-trust-it": "validation/trust",
        "other-peoples-modules": "validation/modules",
        "others-gpus": "validation/published",
        "without-a-gpu": "validation/nogpu",
        "at-true-size-on-any-machine": "validation/true-size",
        "on-a-gpu": "validation/gpu",
        "a-suite-of-your-own": "validation/suites",
        "overnight-and-on-more-than-one-machine": "validation/overnight",
    },
}
"""The chapters of the READMEs that are pages here, by their headings' anchors."""


LINK: Final = r"\[([^]]+)\]\(([^)#\s]*)(?:#([^)]*))?\)"


def chapters() -> dict[str, str]:
    """Chapters of the READMEs as pages, with links between them."""
    found = {}
    for file, pages in CHAPTERS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        # A page's title is its README's heading, one level up.
        for chapter in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]:
            heading = chapter.partition("\n")[0]
            if page := pages.get(anchor(heading.removeprefix("## "))):
                raised = re.sub(r"^#(#+ )", r"\1", chapter, flags=re.MULTILINE)
                found[page] = re.sub(LINK, partial(_link, file=file), raised)
    absent = {page for pages in CHAPTERS.values() for page in pages.values()} - set(found)
    if absent:
        raise ValueError(f"chapters that no README has: {', '.join(sorted(absent))}")
    return found


def anchor(heading: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _link(link: re.Match[str], file: str) -> str:
    """A link of a README as one of these pages; the text alone if what it leads to is no page here."""
    text, path, heading = link.groups()
    if path.startswith("http"):
        return link[0]
    target = str(((ROOT / file).parent / path).resolve().relative_to(ROOT)) if path else file
    page = CHAPTERS.get(target, {}).get(heading or "")
    if page is None and target == "validate/README.md" and heading == "nvidias-own-bytes-of-megatron-core":
        return f"[{text}](/validation/published.md#{heading})"
    return f"[{text}](/{page}.md)" if page else text
