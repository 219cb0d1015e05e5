"""What the docstrings say to readers of the source → Markdown, for the API pages (an extension of griffe)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import griffe

_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): ", re.M)
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


def with_types(docstring: str, parameters: Mapping[str, str]) -> str:
    """Give arguments that are described together the type that they have in common.

    Args:
        docstring: one in Google's style.
        parameters: the type of each.

    Example:
        ``keep_last, keep_every: what stays`` becomes ``keep_last, keep_every (int | None): what stays``
    """

    def typed(found: re.Match[str]) -> str:
        types = {parameters.get(name) for name in found[2].split(", ")}
        return found[0] if len(types) > 1 or None in types else f"{found[1]}{found[2]} ({types.pop()}): "

    return _SEVERAL.sub(typed, docstring)


class Docstrings(griffe.Extension):
    """Rewrites docstrings, and lets what they raise lead to the errors."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of what was read."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Add types to what the docstring of a class says of its arguments and attributes."""
        made = cls.members.get("__init__")
        if cls.docstring is None or not isinstance(made, griffe.Function):
            return
        types = {each.name: each.annotation for each in made.parameters if each.annotation is not None}
        cls.docstring.value = with_types(cls.docstring.value, {name: str(type_) for name, type_ in types.items()})
        for name, each in cls.members.items():
            if isinstance(each, griffe.Attribute) and each.annotation is None and str(each.value) == name:
                each.annotation = types.get(name)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Let each module know the errors, also those that it does not import: it raises them through others."""
        if "errors" in pkg.members:
            names = [name for name, each in pkg["errors"].members.items() if isinstance(each, griffe.Class)]
            for module in _modules(pkg):
                for name in names:
                    if module is not pkg["errors"] and name not in module.members:
                        module.set_member(name, griffe.Alias(name, f"{pkg.name}.errors.{name}"))


def _modules(pkg: griffe.Module) -> Iterator[griffe.Module]:
    yield pkg
    for module in list(pkg.members.values()):
        if isinstance(module, griffe.Module):
            yield from _modules(module)
