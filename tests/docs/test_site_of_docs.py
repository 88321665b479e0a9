"""The site that `make docs` builds from docs/: its pages, links and notebooks (mkdocs.yml).

Building it checks every link and anchor, and needs mkdocs: `make docs`, also in .ci/run.
"""

import doctest
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_doctests_of_the_hooks_pass() -> None:
    failed, tried = doctest.testmod(hooks())
    assert (failed, tried > 3) == (0, True)


def test_the_navigation_of_the_site_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = hooks().on_config(yaml.safe_load(text))["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(nav)))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    notebooks = {str(p.relative_to(DOCS).with_suffix(".md")) for p in DOCS.rglob("*.ipynb")}
    assert listed == pages | notebooks | {*hooks().PAGES}


def test_no_page_of_the_site_has_a_relative_link_out_of_it() -> None:
    """After the hooks, links lead into docs/ or are absolute addresses."""
    with_site_links = hooks().with_site_links
    for path in (*DOCS.rglob("*.md"), *(ROOT / name for name in hooks().PAGES)):
        text = with_site_links(path.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s#]+)", text):
            inside = (
                target.startswith("http")
                or (DOCS / target).exists()
                or target
                in (
                    *hooks().PAGES,
                    *(f"../{name}" for name in hooks().PAGES),
                    *(str(p.relative_to(DOCS).with_suffix(".md")) for p in DOCS.rglob("*.ipynb")),
                )
                or (path.parent / target).exists()
            )
            assert inside, f"{path.name}: {target}"


def test_reading_a_page_loads_nothing_from_other_hosts() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    assert config["strict"] is True and config["theme"]["font"] is False
    assert "http" not in text and not {"extra_javascript", "extra_css", "repo_url"} & set(config)


def test_a_notebook_becomes_a_page_with_its_text_and_code() -> None:
    path = DOCS / "tutorials" / "first_run.ipynb"
    page = hooks().as_page(path.read_text(encoding="utf-8"), path.name)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert "".join(cell["source"]) in page
    assert page.count("```python\n") == page.count("\n```\n") > 3
