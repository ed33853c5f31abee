"""The hooks of the documentation site, which mkdocs.yml names.

They add the pages that are files of the repository's root, and adapt links to files that are not part of the site.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
_DOCS = _ROOT / "docs"

# Page of the site -> the file that it shows.
ROOT_PAGES = {
    "contributing/index.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "threat-model.md": "SECURITY.md",
}

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are files of the repository's root."""
    for page, name in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(_ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt the links of a page."""
    return adapt_links(markdown, page.file.src_uri)


def adapt_links(markdown: str, page: str) -> str:
    """Adapt a page's links, which are written for readers of the repository, to the site.

    A link to a page of the site stays a link. A link to another file of the repository becomes its path.
    """
    name = ROOT_PAGES.get(page)
    folder = _ROOT if name else (_DOCS / page).parent

    def adapt(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        file = Path(os.path.normpath(folder / target))  # not resolved: a symbolic link keeps its name
        pages = {_ROOT / source: PurePosixPath(uri) for uri, source in ROOT_PAGES.items()}
        if file.is_relative_to(_DOCS):
            uri = PurePosixPath(file.relative_to(_DOCS).as_posix())
        elif file in pages:
            uri = pages[file]
        elif file.exists() and file.is_relative_to(_ROOT):
            path = f"`{file.relative_to(_ROOT).as_posix()}`"
            return path if text.strip("`") in path else f"{text} ({path})"
        else:
            return match[0]  # a dead link, which mkdocs reports
        return f"[{text}]({os.path.relpath(uri, PurePosixPath(page).parent)}{anchor})"

    return _LINK.sub(adapt, markdown)
