"""The documentation site: the repository's own Markdown files, built by Sphinx (`make site`).

The source folder is the repository, so the links between its files work here as they do on a code host.
Links to files that are not pages (JSON, code) become downloads. Headings have GitHub's anchors.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = _project["name"]
release = version = _project["version"]
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "ARCHITECTURE.md", "docs/*.md", "models/README.md", "apps/swift/README.md"]
exclude_patterns = [".*", "build", "runs", "tests", "**/node_modules", "**/.build"]
# Tables that `ss-bench run` writes beside its JSON, without a heading; docs/benchmark.md reports them.
exclude_patterns += ["docs/benchmark_*.md"]
smartquotes = False  # it turns the two hyphens of an option into a dash

myst_heading_anchors = 4
myst_enable_extensions = []
# A block of code without a language is shell input with output: no highlighting, and no warning.
highlight_language = "none"

html_theme = "furo"
html_title = f"{project} {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
templates_path = ["_templates"]
html_additional_pages = {"index": "index_redirect.html"}

# Captions and pages of the contents; README itself carries no directives.
CONTENTS = {
    "Use": [
        "docs/commands", "docs/python", "docs/demo", "docs/training", "docs/models", "docs/coreai",
        "apps/swift/README",
    ],
    "Understand": ["docs/method", "docs/platform", "ARCHITECTURE", "docs/families", "docs/reference"],
    "Measured": [
        "models/README", "docs/benchmark", "docs/runtime", "docs/runtime_profile", "docs/packages",
        "docs/robustness", "docs/fault_injection",
    ],
}  # fmt: skip


def _add_contents(_app, name: str, source: list[str]) -> None:
    """Append the tables of contents to the first page when it is read."""
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def setup(app) -> dict:
    app.connect("source-read", _add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
