"""The language of the mapping: lines are rules, and patterns match names and make new ones."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from ..errors import ConfigError

_WILD = re.compile(r"\{([A-Za-z_]\w*)(\.\.\.)?\}|(\*\*?)")
_LIST = re.compile(r"\{([^{}]*,[^{}]*)\}")
_OPTION = re.compile(r"(\w+)=(-?\d+(?:,-?\d+)*)")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A name with placeholders: ``layers.{i}.weight``, ``model.{rest...}``, ``*.bias``."""

    text: str

    def __str__(self) -> str:
        return self.text

    @functools.cached_property
    def captures(self) -> tuple[str, ...]:
        """The names of its placeholders, each once."""
        return tuple(dict.fromkeys(match[1] for match in _WILD.finditer(self.text) if match[1]))

    @functools.cached_property
    def anonymous(self) -> bool:
        """Whether it has placeholders without a name."""
        return any(match[3] for match in _WILD.finditer(self.text))

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        regex, at, seen = "", 0, set()
        for match in _WILD.finditer(self.text):
            regex += re.escape(self.text[at : match.start()])
            at, name = match.end(), match[1]
            anything = ".+" if match[2] or match[3] == "**" else "[^.]+"
            regex += anything if not name else f"(?P={name})" if name in seen else f"(?P<{name}>{anything})"
            seen.add(name)
        return re.compile(regex + re.escape(self.text[at:]), re.DOTALL)

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of its placeholders in a name; None if it does not match. Not collective."""
        match = self._regex.fullmatch(name)
        return None if match is None else match.groupdict()

    def fill(self, captures: Mapping[str, str]) -> str:
        """Return the name with these values for its placeholders. Not collective."""
        return _WILD.sub(lambda match: captures[match[1]], self.text)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A line of a mapping.

    Attributes:
        where: file and line.
        text: the line.
        verb: keep, drop, rename, transpose, split, join, stack or unstack.
        patterns: names of the tensors that it applies to.
        targets: names of the results.
        options: numbers by name.
    """

    where: str
    text: str
    verb: str
    patterns: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    options: Mapping[str, tuple[int, ...]]

    def error(self, message: str, tensor: str | None = None, *, expected: object = None, found: object = None
              ) -> ConfigError:  # fmt: skip
        """Make an error that names the rule. Not collective."""
        return ConfigError(f"{self.where}: {message}: {self.text}", tensor=tensor, expected=expected, found=found)


_MANY = 1_000
_VERBS = {  # number of patterns, number of targets, options
    "keep": (_MANY, 0, ()),
    "drop": (_MANY, 0, ()),
    "rename": (1, 1, ()),
    "transpose": (_MANY, 0, ("dims",)),
    "split": (1, _MANY, ("dim", "sizes", "groups")),
    "join": (_MANY, 1, ("dim", "groups")),
    "stack": (_MANY, 1, ("dim",)),
    "unstack": (1, 1, ("dim",)),
}


def read_rules(text: str, file: str = "the mapping") -> list[Rule]:
    """Read a mapping with one rule per line. ``#`` begins a comment.

    Not collective.

    Raises:
        ConfigError: a line is not a rule. The error names file and line.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        if rule := re.sub(r"(^|\s)#.*", "", line).strip():
            rules.append(_read_rule(f"{file}, line {number}", rule))
    return rules


def _read_rule(where: str, text: str) -> Rule:
    verb, *words = text.split()
    options = {match[1]: tuple(map(int, match[2].split(","))) for word in words if (match := _OPTION.fullmatch(word))}
    names = " ".join(word for word in words if not _OPTION.fullmatch(word))
    left, arrow, right = names.partition("->")
    rule = Rule(where, text, verb, _patterns(left), _patterns(right), options)
    if verb not in _VERBS:
        raise rule.error("unknown verb", expected=", ".join(_VERBS), found=verb)
    most_patterns, most_targets, allowed = _VERBS[verb]
    if not 0 < len(rule.patterns) <= most_patterns or bool(most_targets) != bool(arrow and rule.targets) or (
        len(rule.targets) > most_targets
    ):  # fmt: skip
        raise rule.error("not a rule", expected=f"{verb} {_form(most_patterns)}"
                         + (f" -> {_form(most_targets)}" if most_targets else ""))  # fmt: skip
    if unknown := sorted(options.keys() - set(allowed)):
        raise rule.error("unknown option", expected=", ".join(allowed) or "none", found=", ".join(unknown))
    _refuse_bad_names(rule)
    _refuse_bad_numbers(rule)
    return rule


def _form(most: int) -> str:
    return "NAME" if most == 1 else "NAME, NAME, …"


def _patterns(text: str) -> tuple[Pattern, ...]:
    """Read the names of a list, with ``{a,b}`` expanded."""
    names: list[str] = []
    for word in re.split(r",(?![^{]*\})", text):
        if word := word.strip():
            listed = _LIST.search(word)
            pieces = listed[1].split(",") if listed else []
            names += [word.replace(listed[0], piece.strip()) for piece in pieces] if listed else [word]
    return tuple(map(Pattern, names))


def _refuse_bad_names(rule: Rule) -> None:
    for pattern in rule.patterns + rule.targets:
        if any(mark in _WILD.sub("", pattern.text) for mark in "{}*= "):
            raise rule.error("not a name or a pattern", found=pattern)
    captures = set(rule.patterns[0].captures)
    for target in rule.targets:
        if target.anonymous:
            raise rule.error("name this placeholder: {x} instead of *, {x...} instead of **", found=target)
        unknown = sorted(set(target.captures) - captures)
        if len(unknown) != (rule.verb == "unstack"):
            raise rule.error("the new name needs a placeholder for the index" if rule.verb == "unstack"
                             else "this placeholder has no value: the old name does not have it", expected="{n}"
                             if rule.verb == "unstack" else None, found=unknown or None)  # fmt: skip
    if rule.verb in ("join", "stack"):
        for pattern in rule.patterns:
            if pattern.anonymous or set(pattern.captures) != captures:
                raise rule.error("all names to join need placeholders with the same names",
                                 expected=rule.patterns[0], found=pattern)  # fmt: skip


def _refuse_bad_numbers(rule: Rule) -> None:
    for name in ("dim", "groups"):
        if len(rule.options.get(name, (1,))) != 1:
            raise rule.error(f"{name}= takes one number")
    sizes = rule.options.get("sizes")
    if min(rule.options.get("groups", (1,))) < 1 or (sizes and min(sizes) < 0):
        raise rule.error("sizes and groups must be above 0")
    if sizes and len(sizes) != len(rule.targets):
        raise rule.error("each part needs its size", expected=f"{len(rule.targets)} sizes", found=sizes)
