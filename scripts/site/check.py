"""Check the built site: keys and metrics have anchors and are found by the search, and no other host is asked."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

from hooks import DOCS, KEY, ROOT

SITE = ROOT / "build" / "site"


class Page(HTMLParser):
    """The anchors of a page, and the addresses that a browser would load for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids |= {value for name, value in attributes if name == "id" and value}
        source = values.get("src") or (values.get("href") if tag == "link" else None)
        if source:
            self.loaded.append(source)


def main() -> int:
    problems = []
    found = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    searched = " ".join(entry["text"] for entry in found if entry["location"].startswith("reference/"))
    words = set(re.split(r"[\s<>]+", searched))
    count = 0
    for name in ("config", "metrics"):
        ids = Page(SITE / "reference" / name / "index.html").ids
        lines = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8").splitlines()
        for key in {row[2] for line in lines if (row := KEY.match(line))}:
            count += 1
            if not any(each == key or each.endswith(f".{key}") for each in ids):
                problems.append(f"{key} of {name}.md has no anchor")
            if key not in words:
                problems.append(f"{key} of {name}.md is not found by a search")
    pages = list(SITE.rglob("*.html"))
    for path in pages:
        others = [address for address in Page(path).loaded if re.match(r"(https?:)?//", address)]
        problems += [f"{path.relative_to(SITE)} loads {address}" for address in others]
    print("\n".join(problems[:20]))
    print(f"{len(pages)} pages, {count} keys and metrics, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
