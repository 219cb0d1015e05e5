"""Tensors made from tensors: parts, transposes, joins.

A formula is a value. Its shape is known without reading a byte. Its bytes are made on request. Two equal formulas have
equal bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]
Read = Callable[[str], np.ndarray]
"""Returns a tensor of the checkpoint in its shape, with opaque elements."""


class Formula(Protocol):
    """A tensor made from others."""

    @property
    def shape(self) -> Shape: ...
    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors of the checkpoint that it is made from."""

    def make(self, read: Read) -> np.ndarray:
        """Make the tensor. Return a view if possible, else a copy."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor of the checkpoint as it is."""

    name: str
    shape: Shape

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)

    def make(self, read: Read) -> np.ndarray:
        return read(self.name)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part from ``start`` to ``stop`` along a dimension."""

    of: Formula
    dim: int
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        shape = self.of.shape
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])

    @property
    def sources(self) -> tuple[str, ...]:
        return self.of.sources

    def make(self, read: Read) -> np.ndarray:
        part: np.ndarray = self.of.make(read)[(slice(None),) * self.dim + (slice(self.start, self.stop),)]
        return part


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A tensor with its dimensions in another order: dimension i is ``dims[i]`` of the other tensor."""

    of: Formula
    dims: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(self.of.shape[dim] for dim in self.dims)

    @property
    def sources(self) -> tuple[str, ...]:
        return self.of.sources

    def make(self, read: Read) -> np.ndarray:
        return np.transpose(self.of.make(read), self.dims)


@dataclasses.dataclass(frozen=True)
class Reshaped:
    """A tensor in another shape with the same number of elements."""

    of: Formula
    shape: Shape

    @property
    def sources(self) -> tuple[str, ...]:
        return self.of.sources

    def make(self, read: Read) -> np.ndarray:
        reshaped: np.ndarray = self.of.make(read).reshape(self.shape)
        return reshaped


@dataclasses.dataclass(frozen=True)
class Joined:
    """Several tensors, one after the other along a dimension."""

    parts: tuple[Formula, ...]
    dim: int

    @property
    def shape(self) -> Shape:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.sources))

    def make(self, read: Read) -> np.ndarray:
        return np.concatenate([part.make(read) for part in self.parts], axis=self.dim)


def _unit(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], 1, *shape[dim:])


def stacked(parts: tuple[Formula, ...], dim: int) -> Formula:
    """Join along a new dimension. Not collective."""
    return Joined(tuple(Reshaped(part, _unit(part.shape, dim)) for part in parts), dim)


def taken(of: Formula, dim: int, index: int) -> Formula:
    """Take one index of a dimension, and remove the dimension. Not collective."""
    return Reshaped(Part(of, dim, index, index + 1), (*of.shape[:dim], *of.shape[dim + 1 :]))
