"""The page's files: the vendored library is the release that is named, nothing is inline or from
elsewhere, and the modules' logic holds.
"""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

UI = Path(__file__).resolve().parents[4] / "atroposlib" / "dashboard"
STATIC, TEMPLATES = UI / "static", UI / "templates"
VENDORED = sorted((STATIC / "vendor").glob("*/vendored.json"))
OURS = sorted(path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts)
PAGES = sorted(TEMPLATES.glob("*.html"))
COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}\b|\b(?:rgb|hsl)a?\(")
PURE = ("bits", "dom", "figures", "format", "http", "runs", "series", "stack", "visible")


@pytest.mark.parametrize("about", VENDORED, ids=lambda path: path.parent.name)
def test_vendored_files_are_those_of_the_release(about: Path) -> None:
    told = json.loads(about.read_text())
    assert {"name", "version", "license", "integrity", "sha256"} <= told.keys()
    assert "LICENSE" in told["sha256"]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in about.parent.iterdir() if path != about}
    assert found == told["sha256"]


def test_something_is_vendored() -> None:
    assert [path.parent.name for path in VENDORED] == ["uplot"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_obey_the_policy(page: Path) -> None:
    """Scripts and styles are files of ours: the content security policy refuses all else, and the
    page would be bare.
    """
    text = page.read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text)
    for script in re.findall(r"<script\b[^>]*>", text):
        assert "src=" in script
    assert not re.search(r"(?:https?:)?//[a-z]", text)


@pytest.mark.parametrize("path", [*OURS, *PAGES], ids=lambda path: path.name)
def test_files_are_short_and_of_this_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    addresses = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}
    assert not addresses
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize("path", [path for path in OURS if path.suffix in (".css", ".js")], ids=lambda path: path.name)
def test_colours_have_names(path: Path) -> None:
    """One file names the colour of each thing, in light and dark."""
    if path.name == "base.css":
        return
    # what makes a colour of ours fainter
    text = re.sub(r"rgba\(\$1, |/\^rgb.*?/", "", path.read_text())
    assert not COLOUR.search(re.sub(r"`[^`]*`|\"#\"", "", text))


def test_modules_find_each_other() -> None:
    """Without a build step only this test finds it."""
    for path in OURS:
        if path.suffix == ".js":
            for name in re.findall(r"^(?:import|export)\b[^;]*?from \"(\./[^\"]+)\"", path.read_text(), re.MULTILINE):
                assert (path.parent / name).is_file(), f"{path.name} imports {name}"


def test_the_logic_of_the_page(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node, which runs the modules without a browser, is not installed (apt-get install nodejs)")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for name in PURE:
        shutil.copy(STATIC / f"{name}.js", tmp_path)
    tests = tmp_path / "page_logic.test.mjs"
    shutil.copy(Path(__file__).with_name(tests.name), tests)
    done = subprocess.run([node, "--test", str(tests)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kind_of_event_is_in_the_docs() -> None:
    groups = re.findall(r'label: "([^"]+)", kinds: \[([^\]]+)\]', (STATIC / "events.js").read_text())
    assert len(groups) == 4
    docs = (UI.parents[1] / "docs" / "ui.md").read_text()
    for label, kinds in groups:
        (told,) = re.findall(rf"^\| {label} \| (.+) \|$", docs, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", told)) == set(re.findall(r'"(\w+)"', kinds)), label
