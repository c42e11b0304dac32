"""What the site adds to docs/: navigation, notebooks, linked files from outside, and anchors of keys and metrics."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = Path(__file__).with_name("api.md")
OUTSIDE = "repository"
"""The folder of the site for files from outside of docs/."""
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")
HEADING = re.compile(r"^#+ `\[+([\w.]+)\]+`|^(#+) ")
KEY = re.compile(r"^\| (\[?)`([\w./@{}-]+)`")


def on_config(config: Any) -> Any:
    """Make the navigation of the tables of docs/index.md: a tab for each, and the pages in their order."""
    tables: dict[str, list[str]] = {}
    for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"^\| ([A-Z][\w ]+) \| \|$", line):
            tables[heading[1]] = []
        elif line.startswith("| [") and tables:
            pages = [
                link
                for _, link, _, _ in LINK.findall(line)
                if link.endswith((".md", ".ipynb")) and (DOCS / link).is_file()
            ]
            tables[list(tables)[-1]] += [site_path((DOCS / page).resolve()) for page in pages]
    tables["Reference"].append(site_path(API))
    config["nav"] = ["index.md", site_path(ROOT / "README.md"), *({name: pages} for name, pages in tables.items())]
    config["nav"].append("glossary.md")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the README, the page of the Python interface, notebooks, and what pages link to outside of docs/."""
    notebooks = list(DOCS.rglob("*.ipynb"))
    outside = {API, ROOT / "README.md"}
    unread = [*DOCS.rglob("*.md"), *notebooks, *outside]
    while unread:
        page = unread.pop()
        for _, link, _, _ in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            is_new = target.is_file() and target.is_relative_to(ROOT) and target not in outside
            if is_new and not target.is_relative_to(DOCS):
                outside.add(target)
                unread += [target] if target.suffix == ".md" else []
    for path in sorted([*outside, *notebooks]):
        files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
    return files


def site_path(path: Path) -> str:
    if path == API:
        return f"{OUTSIDE}/api.md"
    path = path.with_suffix(".md") if path.suffix == ".ipynb" else path
    inside = path.is_relative_to(DOCS)
    return path.relative_to(DOCS).as_posix() if inside else f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"


def on_page_read_source(page: Any, config: Any) -> str | None:
    """Write a notebook with its outputs as Markdown; None: the page is read as it is."""
    path = Path(page.file.abs_src_path)
    if path.suffix != ".ipynb":
        return None
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            if svg := data.get("image/svg+xml"):
                encoded = base64.b64encode(svg.encode()).decode()
                parts.append(f"![Plot](data:image/svg+xml;base64,{encoded})")
            elif html := data.get("text/html"):
                parts.append(re.sub(r"<style.*?</style>\s*|\n\s*\n", "", html, flags=re.DOTALL))
            else:
                parts.append(f"```text\n{data.get('text/plain') or ''.join(output['text'])}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = Path(page.file.abs_src_path).resolve()
    here = Path(site_path(source)).parent

    def relink(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if target.is_dir():  # a folder of the repository, which the site does not have
            return f"]({os.path.relpath(site_path(ROOT / 'README.md'), here)})"
        if not target.is_file():
            return match[0]  # reported as a dead link
        return f"{match[1]}{os.path.relpath(site_path(target), here)}{match[3] or ''}{match[4]}"

    return with_anchors(LINK.sub(relink, markdown)) if source.parent.name == "reference" else LINK.sub(relink, markdown)


def with_anchors(markdown: str) -> str:
    """Give each row of a table of keys or metrics an anchor: `#trainer.optim.lr`, `#reward/all/mean`."""
    section, seen, lines = "", set[str](), []
    for line in markdown.splitlines():
        if heading := HEADING.match(line):
            section = f"{heading[1]}." if heading[1] else ""
        if row := KEY.match(line):
            name = f"{section}{row[2]}"
            if name not in seen:
                seen.add(name)
                line = f'| <a id="{name}"></a>{line[2:]}'
        lines.append(line)
    return "\n".join(lines)
