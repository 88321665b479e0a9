"""What the site adds to docs/: pages of the repository's root, and notebooks as pages.

mkdocs calls the functions on_config, on_files and on_page_markdown (mkdocs.yml).
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # of the root
#: What lies outside of the site.
CODE = r"privssl|configs|tests|accounting|generators|benchmarks|examples|containers|README\.md"


def on_config(config: Any) -> Any:
    """List the pages of measured tables, which `reproduce --render` writes, under Results."""
    [results] = [part["Results"] for part in config["nav"] if "Results" in part]
    pages = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md"))
    results[1:1] = [f"results/{name}" for name in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Replace notebooks by pages, and add those of the root."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = file.src_uri.replace(".ipynb", ".md")
        text = as_page(Path(file.abs_src_path).read_text(encoding="utf-8"), Path(file.src_uri).name)
        files.append(File.generated(config, page, content=text))
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the site."""
    return with_site_links(markdown, "../" * page.file.src_uri.count("/"))


def with_site_links(markdown: str, up: str = "") -> str:
    """Links between docs/ and the root as links of the site; a link to code loses its target.

    >>> with_site_links("[a](../SECURITY.md#x), [b](docs/data.md), [`c`](privssl/core)")
    '[a](SECURITY.md#x), [b](data.md), `c`'
    >>> with_site_links("[d](e.ipynb)")
    '[d](e.md)'
    """
    names = "|".join(map(re.escape, PAGES))
    markdown = re.sub(rf"\]\((?:\.\./)+({names})", rf"]({up}\1", markdown)
    markdown = re.sub(r"\]\(docs/", "](", markdown)
    markdown = re.sub(r"(\]\([\w./-]+)\.ipynb", r"\1.md", markdown)
    return re.sub(rf"\[([^\]]*)\]\((?:\.\./)*(?:{CODE})[^)]*\)", r"\1", markdown)


def as_page(notebook: str, name: str) -> str:
    """A notebook's cells as Markdown.

    >>> cells = [{"cell_type": "markdown", "source": ["# A\\n", "b"]},
    ...          {"cell_type": "code", "source": ["print(1)"]}]
    >>> print(as_page(json.dumps({"cells": cells}), "a.ipynb"))
    # A
    b
    <BLANKLINE>
    ```python
    print(1)
    ```
    <BLANKLINE>
    *Notebook: `docs/tutorials/a.ipynb`.*
    <BLANKLINE>
    """
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"*Notebook: `docs/tutorials/{name}`.*\n"])
