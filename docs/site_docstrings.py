"""What the docstrings say to readers of the source → Markdown, for the API pages (an extension of griffe)."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:meth|class|func|mod|attr|data):(?=`)")
_EXAMPLE = re.compile(r"^( *)Example:\n((?:\1 +.*\n|\n)+)", re.M)


def to_markdown(docstring: str) -> str:
    """Take out Sphinx's roles, and fence examples that are code.

    Example:
        A line that begins with a quote or a backquote is prose; all others are code.
    """
    return _EXAMPLE.sub(_fenced, _ROLE.sub("", docstring) + "\n").rstrip()


def _fenced(example: re.Match[str]) -> str:
    indent, body = example[1], example[2].strip("\n")
    first = body.lstrip()
    if first.startswith(("`", '"', "```")) or (first[:1].isupper() and first.rstrip().endswith(".")):
        return example[0]
    deeper = indent + "    "
    return f"{indent}Example:\n{deeper}```python\n{body}\n{deeper}```\n\n"


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object was read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite it."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
