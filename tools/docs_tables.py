"""A Markdown extension, which mkdocs.yml names: it prepares tables for narrow screens."""

from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor

_MOST_STACKED = 4
"""Tables with more columns than this are figures, which are compared by column: they scroll on a narrow screen."""


class _Tables(Treeprocessor):
    """Marks tables, and names the column in each cell, so that docs/assets/site.css can stack the cells of a row."""

    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            columns = ["".join(cell.itertext()) for cell in table.iter("th")]
            if len(columns) <= _MOST_STACKED:
                table.set("data-rows", "stacked")
            for row in table.iter("tr"):
                for cell, column in zip(row.findall("td"), columns, strict=False):
                    cell.set("data-column", column)


class _TablesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After the Markdown in cells has been parsed, which has the priority 20.
        md.treeprocessors.register(_Tables(md), "tables-for-narrow-screens", 15)


def makeExtension() -> Extension:
    """Return the extension. Markdown looks for a function of this name."""
    return _TablesExtension()
