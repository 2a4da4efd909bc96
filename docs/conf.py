"""How Sphinx builds the documentation: `make docs`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]  # memplan and validate as in this checkout, and the pages' generator
os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(DOCS / "howto" / "files")])

import pages  # noqa: E402 (after the paths)
from docutils import nodes  # noqa: E402
from docutils.parsers.rst import directives  # noqa: E402
from sphinx.util.docutils import SphinxDirective  # noqa: E402

import memplan  # noqa: E402

project = "memplan"
author = "The memplan authors"
project_copyright = "The memplan authors, Apache-2.0"
version = release = memplan.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["build", "howto/files", "pages", "validation/summary.md"]

# Pages are Markdown; notebooks are shown as committed, and tests/test_notebooks.py keeps their outputs true.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"

default_role = "code"  # docstrings write `names` as Markdown does
add_module_names = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_custom_sections = [("Attributes whose meaning their name does not tell", "Attributes")]
# Types of other projects, whose documentation is not read here.
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "pydata_sphinx_theme"
html_title = "memplan"
html_static_path = ["_static"]
html_css_files = ["memplan.css"]
html_theme_options = {
    "navigation_with_keys": True,
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "default",
}
html_sidebars: dict[str, list[str]] = {"index": [], "start": []}
html_show_sourcelink = False


class Run(SphinxDirective):
    """`{run}`: a command, which may take several lines, and what it prints while the page is built.

    `:cwd:` is the folder that it runs in, below the page's. `:shows:` begins the paragraphs that are shown of
    a long output, with `|` between them; one that is not printed is an error, as is a command that fails.
    """

    has_content = True
    option_spec: ClassVar[Any] = {"cwd": directives.path, "shows": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """The command and its output as one block."""
        command, page = "\n".join(self.content), Path(self.env.doc2path(self.env.docname))
        done = subprocess.run(
            command, shell=True, text=True, cwd=page.parent / self.options.get("cwd", ""),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode:
            raise self.error(f"{command}\n{done.stdout}")
        text = f"$ {command}\n{self._shown(done.stdout.rstrip())}"
        return [nodes.literal_block(text, text, language="console")]

    def _shown(self, output: str) -> str:
        """The output, or its paragraphs that are to be shown, with `...` for those between."""
        starts = [start.strip() for start in self.options.get("shows", "").split("|") if start.strip()]
        if not starts:
            return output
        shown, last = [], -1
        paragraphs = output.split("\n\n")
        for start in starts:
            place = next((i for i, each in enumerate(paragraphs) if each.lstrip().startswith(start)), None)
            if place is None:
                raise self.error(f"no paragraph begins with {start!r}:\n{output}")
            shown += ["..."] * (place > last + 1) + [paragraphs[place]]
            last = place
        return "\n\n".join(shown)


PLANNER = ROOT / "memplan" / "web" / "dist"
"""The planner in the browser, if it was built."""


def _copy_planner(app: Any, error: Exception | None) -> None:
    if error is None and PLANNER.is_dir():
        shutil.copytree(PLANNER, Path(app.outdir) / "planner", dirs_exist_ok=True)


def _list_options(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Shows the options of engines, which a docstring has below `**options`, as a list."""
    starts = [i for i, line in enumerate(lines) if line.startswith("    **options")]
    listed = starts[0] + 1 if starts else len(lines)
    for i in range(listed, len(lines)):
        if re.match(r" {8}\w+: ", lines[i]):
            lines[i] = "        * " + lines[i].strip()
        elif lines[i].startswith(" " * 12):
            lines[i] = " " * 10 + lines[i].strip()
    first = next((i for i in range(listed, len(lines)) if lines[i].startswith("        * ")), None)
    if first is not None:
        lines.insert(first, "")


def _short_signature(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """A signature without the engines' options, which `**options` stands for."""
    return signature and re.sub(r", \w+=Ellipsis", "", signature), returned


def setup(app: Any) -> None:
    """Writes the generated pages before any page is read."""
    if PLANNER.is_dir():
        app.tags.add("planner")
    pages.write(DOCS)
    app.add_directive("run", Run)
    app.connect("autodoc-process-docstring", _list_options, priority=400)  # before napoleon reads it
    app.connect("autodoc-process-signature", _short_signature)
    app.connect("build-finished", _copy_planner)
