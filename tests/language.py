"""Phrases and sentences that make prose hard to read, counted per document and per package.

    python -m tests.language                    # rewrite tests/language_counts.json, and print it as a table
    python -m tests.language docs/async.md …    # list what is counted in these documents

The counts in the file are upper limits. They may fall, and they may move from one document to another; their sum may not rise.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "tests" / "language_counts.json"
COMMAND = "python -m tests.language"
PACKAGES = ("atroposlib", "bench", "environments", "example_trainer", "scripts", "tests", "vllm_patching")
LONGEST_SENTENCE = 25
GUIDE_PHRASES_PER_1000_WORDS = 1
GUIDES = ("start", "your-environment", "your-loss", "your-model", "several-gpus", "several-machines", "troubleshooting")
"""Pages that are guides wherever the index docs/README.md puts them."""

PHRASES = {
    "write what a program does, as in `the log names`": r"(?:tell(?:s|ing)?|told|say(?:s|ing)?|said|hear[sd]|hearing)",
    "a program is `it`; write `which` or repeat the noun": r"(?:whoever|whom)",
    "repeat the noun": r"those\s+(?:that|who|of)|that\s+which|the\s+one\s+(?:that|of|which)|of\s+which",
    "write `is not`": r"(?:is|are|was|were)\s+no\s+(?!longer|more)\w+",
    "name the subject, or use a plainer word": r"(?:nobody|somebody|anybody|everybody|anew|likewise|meanwhile|thereby)",
}
"""Remedy -> the phrases that it replaces."""
WHO = re.compile(r"(?<=[,:;.]\s)who\b")
OPENING = re.compile(r"[*_\"(]*(What|Whatever|Whether|How|That which|Those|Of)\b")
DOCSTRING_OPENING = re.compile(r"\s*(What|Whatever|Whether|How|That|Those|Of)\b")
BULLET = r"[^\S\n]*(?:[-*+]|\d+\.)\s"
PARAGRAPH = re.compile(rf"^\|.*$|^#.*$|^[^\n]*\S[^\n]*(?:\n(?!{BULLET}|[#|])[^\n]*\S[^\n]*)*", re.MULTILINE)
"""A row of a table, a heading, an item of a list, or lines up to the next of these or to an empty line."""
OPENING_REMEDY = "begin with the subject or the condition"
DOCSTRING_REMEDY = "begin a docstring with an imperative or a noun phrase"


class Hit(NamedTuple):
    """One phrase, sentence or opening to reword."""

    kind: str
    line: int
    text: str
    remedy: str


def blank(pattern: str, text: str, filler: str = " ") -> str:
    """Replace every match by filler of the same length, so that positions and lines stay what they were."""
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", filler, m[0]), text, flags=re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Return a document with its code, generated tables, comments and addresses blanked; inline code becomes one word each."""
    for pattern in (
        r"^[ ]*```.*?^[ ]*```[^\n]*$",
        r"<!--= [^\n>]*-->\n.*?<!--/-->",
        r"<!--.*?-->",
        r"(?<=\n\n)(?: {4}[^\n]*\n)+",
        r"<[a-z/][^>]*>",
        r"!\[[^\]]*\]\([^)]*\)",
        r"(?<=\])\([^)]*\)",
        r"^\|[-| :]+\|$",
    ):
        text = blank(pattern, text)
    text = blank(r"(?:(?<=e\.g)|(?<=i\.e)|(?<=\bcf)|(?<=\bvs)|(?<=\barXiv))\.", text, "_")
    return blank(r"`[^`\n]+`", text, "x")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield position and text of each paragraph, item of a list, heading and cell of a table."""
    for match in PARAGRAPH.finditer(text):
        if match[0].startswith("|"):
            for cell in re.finditer(r"[^|]+", match[0]):
                yield match.start() + cell.start(), cell[0]
        else:
            bullet = re.match(BULLET, match[0])
            begin = bullet.end() if bullet else 0
            yield match.start() + begin, match[0][begin:]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield position and text of each sentence of a blanked document."""
    for position, paragraph in paragraphs(text):
        begin = 0
        for end in [
            *(m.end() for m in re.finditer(r"[.!?][\"')\]*_]*\s+(?=[\"'(\[*_`]*(?:[A-Z0-9x]|vLLM))", paragraph)),
            len(paragraph),
        ]:
            sentence = paragraph[begin:end]
            if stripped := sentence.strip():
                yield position + begin + sentence.index(stripped[0]), stripped
            begin = end


def words(text: str) -> int:
    """Count the words of a blanked text."""
    return len(re.findall(r"\S*[A-Za-z0-9]\S*", text))


def hits_in_document(text: str) -> list[Hit]:
    """List what to reword in a document, in the order of its lines."""
    shown, found = prose(text), []

    def add(kind: str, position: int, excerpt: str, remedy: str) -> None:
        found.append(Hit(kind, text.count("\n", 0, position) + 1, " ".join(excerpt.split()), remedy))

    for remedy, phrases in PHRASES.items():
        for match in re.finditer(rf"\b(?:{phrases})\b", shown, re.IGNORECASE):
            add("phrases", match.start(), match[0], remedy)
    for match in WHO.finditer(shown):
        add("phrases", match.start(), match[0], "a program is `it`; write `which` or repeat the noun")
    for position, sentence in sentences(shown):
        original = text[position : position + len(sentence)]
        opening = OPENING.match(sentence)
        if opening and not sentence.endswith("?") and not shown[:position].rpartition("\n")[2].startswith("#"):
            add("phrases", position, original[:40] + " …", OPENING_REMEDY)
        if (length := words(sentence)) > LONGEST_SENTENCE:
            add("long sentences", position, original[:60] + " …", f"{length} words: at most {LONGEST_SENTENCE}, one idea each")
    return sorted(found, key=lambda hit: hit.line)


def hits_in_code(source: str) -> list[Hit]:
    """List the docstrings, of attributes too, that begin with a noun clause."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return [
        Hit("docstring openings", node.lineno, str(node.value).strip().splitlines()[0][:60], DOCSTRING_REMEDY)
        for node in texts
        if DOCSTRING_OPENING.match(str(node.value))
    ]


def documents() -> list[Path]:
    """List the documents that are counted."""
    trainer = ROOT / "example_trainer" / "README.md"
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *([trainer] if trainer.exists() else [])]


def guides() -> list[Path]:
    """List README.md, the pages that the index lists under a heading with "guide" in it, and GUIDES, as far as they exist."""
    index = ROOT / "docs" / "README.md"
    text = index.read_text(encoding="utf-8") if index.exists() else ""
    parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)
    listed = [part for heading, part in zip(parts[1::2], parts[2::2], strict=True) if "guide" in heading.lower()]
    names = {f"{name}.md" for name in GUIDES} | set(re.findall(r"\]\(([\w-]+\.md)", "\n".join(listed)))
    return [path for path in documents() if path == ROOT / "README.md" or (path.parent.name == "docs" and path.name in names)]


def all_hits() -> dict[str, list[tuple[str, Hit]]]:
    """List, for each line of the counts file, what is counted there and the file where it stands."""
    found: dict[str, list[tuple[str, Hit]]] = {}
    for path in documents():
        name = str(path.relative_to(ROOT))
        found[name] = [(name, hit) for hit in hits_in_document(path.read_text(encoding="utf-8"))]
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"))
        hits = {str(path.relative_to(ROOT)): hits_in_code(path.read_text(encoding="utf-8")) for path in files}
        found[f"{package}/"] = [(name, hit) for name, of_file in hits.items() for hit in of_file]
    return found


def counted(hits: Mapping[str, list[tuple[str, Hit]]]) -> dict[str, dict[str, int]]:
    """Count what all_hits lists; a kind that does not occur is left out."""
    return {name: dict(sorted(Counter(hit.kind for _, hit in found).items())) for name, found in hits.items()}


def read_counts(path: Path = COUNTS) -> dict[str, dict[str, int]]:
    """Read the limits. Of a line that a merge left in two versions, each kind counts with its greater number."""
    found: dict[str, dict[str, int]] = {}
    if not path.exists():
        return found
    for name, counts in re.findall(r'^"([^"]+)": (\{[^}]*\}),?$', path.read_text(encoding="utf-8"), re.MULTILINE):
        limits = found.setdefault(name, {})
        for kind, count in json.loads(counts).items():
            limits[kind] = max(count, limits.get(kind, 0))
    return found


def write_counts(now: Mapping[str, Mapping[str, int]], path: Path = COUNTS) -> None:
    """Write the limits, with an empty line between entries, so that git merges changes of neighbours."""
    lines = [f"{json.dumps(name)}: {json.dumps(dict(counts))}" for name, counts in sorted(now.items())]
    path.write_text("{\n" + ",\n\n".join(lines) + "\n}\n", encoding="utf-8")


def changed_since_the_limits() -> set[str]:
    """List the files that differ from the commit that last wrote the limits; nothing outside of a git checkout."""
    git = ("git", "-C", str(ROOT))
    commit = subprocess.run([*git, "log", "-1", "--format=%H", "--", str(COUNTS)], capture_output=True, text=True, timeout=60)
    if commit.returncode or not commit.stdout.strip():
        return set()
    changes = [*git, "diff", "--name-only", commit.stdout.strip()]
    return set(subprocess.run(changes, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines())


def risen(now: Mapping[str, Mapping[str, int]], limits: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str, int, int]]:
    """List name, kind, count and limit wherever a count is above its limit; a name without a line has the limit 0."""
    return [
        (name, kind, count, limits.get(name, {}).get(kind, 0))
        for name, counts in now.items()
        for kind, count in counts.items()
        if count > limits.get(name, {}).get(kind, 0)
    ]


def sums_that_rose(now: Mapping[str, Mapping[str, int]], limits: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Describe each kind whose sum over all names is above the sum of the limits."""
    kinds = sorted({kind for counts in now.values() for kind in counts})
    totals = {kind: [sum(counts.get(kind, 0) for counts in of.values()) for of in (now, limits)] for kind in kinds}
    return [f"{kind}: {count} in all, limit {limit}" for kind, (count, limit) in totals.items() if count > limit]


def main(arguments: list[str]) -> int:
    """List the hits of documents, or rewrite the limits; refuse to raise a sum."""
    if arguments:
        for name in arguments:
            text = Path(name).read_text(encoding="utf-8")
            hits = hits_in_document(text) if name.endswith(".md") else hits_in_code(text)
            print(*(f"{name}:{hit.line}: {hit.text} ({hit.remedy})" for hit in hits), sep="\n")
            print(f"{name}: {words(prose(text))} words, {dict(Counter(hit.kind for hit in hits))}")
        return 0
    now, limits = counted(all_hits()), read_counts()
    if limits and (rose := sums_that_rose(now, limits)):
        print(*rose, sep="\n")
        above = [f"{name}: {count} {kind}, limit {limit}" for name, kind, count, limit in risen(now, limits)]
        print("not written: reword these first", *above, sep="\n  ")
        return 1
    write_counts(now)
    for name, counts in sorted(now.items()):
        changes = [f"{kind} {count} ({count - limits.get(name, {}).get(kind, 0):+d})" for kind, count in counts.items()]
        path = ROOT / name
        length = words(prose(path.read_text(encoding="utf-8"))) if path.is_file() else 0
        rate = [f"{1000 * counts.get('phrases', 0) / length:.1f} phrases per 1,000 words"] if length else []
        print(f"{name:32}", *changes, *rate, sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
