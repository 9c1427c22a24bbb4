"""The static site is built from docs/ without a warning, leads nowhere that is not there, and fetches nothing."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import parallelizer
from parallelizer import training

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def script(path: Path) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.append(str(DOCS))  # as `python docs/site.py` does: it imports docs/api_pages.py
site = script(DOCS / "site.py")
api_pages = script(DOCS / "api_pages.py")


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    named = site.navigation()
    assert len(named) == len(set(named))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | site.MADE
    assert set(named) == pages


def test_every_public_name_has_its_place_in_the_interface_s_pages() -> None:
    placed = [
        name
        for page in sorted((DOCS / "api").glob("*.md"))
        for name in re.findall(r"^<!-- ::: parallelizer\.(\w+)(?: -->)?$", page.read_text(), re.M)
    ]
    assert sorted(placed) == sorted(parallelizer.__all__)
    page = (DOCS / "api" / "recipes.md").read_text()
    assert sorted(re.findall(r"^<!-- ::: parallelizer\.training\.(\w+)(?: -->)?$", page, re.M)) == sorted(
        training.__all__
    )


def test_readers_that_do_not_run_it_find_the_same_public_names() -> None:
    """Type checkers, editors and the documentation read the imports; Python reads the table."""
    for file, face in (
        ("parallelizer/__init__.py", parallelizer),
        ("parallelizer/training/__init__.py", training),
    ):
        text = (ROOT / file).read_text()
        read = re.findall(r"^    from parallelizer\.([\w.]+) import (\w+) as \2$", text, re.M)
        assert sorted(read) == sorted((module, name) for name, module in face._WHERE.items())


def test_links_out_of_the_pages_become_text_and_code_is_left_alone() -> None:
    page = DOCS / "your_own_model.md"
    text = "[a](../README.md) [b](proving.md#the-rule) [c d](../Makefile) [e](https://e.org)\n"
    assert site.for_the_site(text, page) == "`a` [b](proving.md#the-rule) c d [e](https://e.org)\n"
    assert (
        site.for_the_site("[x](../parallelizer/styles/context_parallel/README.md)", page)
        == "[x](context_parallelism.md)"
    )
    code = "```\n[a](../README.md)\n```\n"
    assert site.for_the_site(code, page) == code


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical")
    folder: Path = tmp_path_factory.mktemp("built") / "site"
    assert site.main(folder) == 0
    return folder


def test_the_site_has_every_page(built: Path) -> None:
    for page in site.navigation():
        if (DOCS / page).exists() or page in site.MADE:
            assert (built / page).with_suffix(".html").exists(), page
    text = (built / "api/models.html").read_text()
    assert "Make a model parallel in place and return it." in text


def test_nothing_is_fetched_and_every_file_that_pages_name_is_there(built: Path) -> None:
    for page in built.rglob("*.html"):
        text = page.read_text()
        for tag in re.findall(r"<(?:script|link|img|source|iframe)\b[^>]*>", text):
            for target in re.findall(r'\b(?:src|href)="([^"]*)"', tag):
                assert "//" not in target, f"{page.name} fetches {target}"
                if page.name != "404.html" and not target.startswith(("data:", "#")):
                    assert (page.parent / target.split("?")[0]).exists(), f"{page.name}: {target}"


def test_a_page_with_a_link_that_leads_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zensical")
    monkeypatch.setattr(site, "for_the_site", lambda text, path: "# One\n[a](nothing.md)\n")
    assert site.main(tmp_path / "site") != 0
    assert "nothing.md" in capfd.readouterr().err and not (tmp_path / "site").exists()


def test_the_api_can_be_read_where_no_site_is_built() -> None:
    for path in sorted((ROOT / "docs/api").glob("*.md")):
        text = path.read_text()
        assert not re.search(r"^:::", text, re.M), path
        assert text == api_pages.written(text), "python docs/api_pages.py writes it"
    training = (ROOT / "docs/api/training.md").read_text()
    assert "```text\ntrain_step(" in training and "## train_step" in training
