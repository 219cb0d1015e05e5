"""Modules and optimizers of torch, as they load: what they would refuse, and what they make of tensors.

These questions must be answered without changing anything, and without refusing what loading would have accepted: if a
class or a hook may treat something differently from torch, nothing is reported.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ..errors import MlflashError, StateError, StructureMismatch, text_of
from .flatten import forget_early_iterator, has_not_begun, is_object
from .leaves import Entry, Tree, inside, is_tensor, place_of, tensor_entry
from .plain_values import decode_plain
from .wrapped_tensors import WRAPPED, found_in

_OF_FSDP2 = "torch.distributed.fsdp._fully_shard"  # its hooks only move shards to their places
_PER_STEP = {"step", "eta", "mu", "mu_product"}  # 0-d, whatever the parameter is, and not made like it


def refusals(live: Any, tree: Tree, entries: tuple[Entry, ...], name: str) -> list[str]:
    """List why an object would refuse to load what was saved of it, as far as that can be known."""
    torch = sys.modules.get("torch")
    tree = inside(tree)
    if tree[0] == "p":
        where = name or "(the state itself)"
        return [f"{where}: a plain value in the checkpoint, a {type(live).__name__} in the state given"]
    if torch is None or tree[0] != "d":
        return []
    if isinstance(live, torch.nn.Module):
        return _refused_by_module(torch, live, tree, entries, name)
    return _refused_by_optimizer(live, tree, entries, name) if _loads_as_torch_does(live) else []


def _refused_by_module(torch: Any, live: Any, tree: Tree, entries: tuple[Entry, ...], name: str) -> list[str]:
    wanted = _wanted(torch, live)
    if wanted is None:
        return []
    absent = tuple(f"{path}." for path, module in _children(live) if module is None)
    saved = {decode_plain(key): sub for key, sub in tree[1]}
    prefix = f"{name}." if name else ""
    reasons = []
    for key, tensor in wanted.items():
        if key not in saved:
            if not key.endswith("num_batches_tracked"):  # torch accepts that older versions have none
                reasons.append(f"{prefix}{key}: in the state given, not in the checkpoint")
        elif (was := saved[key][0] == "k") is not (is_now := found_in(tensor, key) is not None):
            words = {True: "a tensor that wraps others", False: "one that wraps none"}
            reasons.append(f"{prefix}{key}: {words[was]} in the checkpoint, {words[is_now]} in the state given")
        elif saved[key][0] == "e":
            entry = entries[saved[key][1]]
            shape, given = entry.global_shape, tuple(tensor.shape)
            if shape != given and not (given == () and len(shape) == 1):
                reasons.append(f"{prefix}{key}: {list(shape)} in the checkpoint, {list(given)} in the state given")
            reasons += _unlike(entry, tensor, f"{prefix}{key}")
    for key in saved.keys() - wanted.keys():
        if not str(key).endswith("_extra_state") and not str(key).startswith(absent):
            reasons.append(f"{prefix}{key}: in the checkpoint, not in the state given")
    return sorted(reasons)


def _unlike(entry: Entry, tensor: Any, name: str) -> list[str]:
    """Why a live tensor cannot get what was saved, bit for bit."""
    if tensor.device.type == "meta":
        return [f"{name}: on the meta device in the state given, where nothing can be loaded: call to_empty() first"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if entry.kind == "tensor" and entry.dtype != dtype:
        return [f"{name}: {entry.dtype} in the checkpoint, {dtype} in the state given"]
    return []


def _wanted(torch: Any, live: Any) -> dict[str, Any] | None:
    """Parameters and buffers that strict loading asks for, by key; None if that is not known."""
    module_class = torch.nn.Module
    usual = {module_class._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict}
    if type(live).load_state_dict is not module_class.load_state_dict or "load_state_dict" in vars(live):
        return None
    wanted: dict[str, Any] = {}
    for path, module in [("", live), *_children(live)]:
        if module is None:
            continue
        hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
        hooks = [getattr(hook, "hook", hook) for hook in hooks]
        own = "_load_from_state_dict" in vars(module) or type(module)._load_from_state_dict not in usual
        if own or any(not str(getattr(hook, "__module__", "")).startswith(_OF_FSDP2) for hook in hooks):
            return None
        left_out = module._non_persistent_buffers_set
        buffers = {key: buffer for key, buffer in module._buffers.items() if key not in left_out}
        for key, tensor in {**module._parameters, **buffers}.items():
            if tensor is not None:
                wanted[f"{path}.{key}" if path else key] = tensor
    return None if any(torch.nn.parameter.is_lazy(tensor) for tensor in wanted.values()) else wanted


def _children(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All modules below one, as loading comes to them: shared ones several times, and None for one that was removed."""
    for key, child in module._modules.items():
        at = f"{path}.{key}" if path else key
        yield at, child
        if child is not None:
            yield from _children(child, at)


def _refused_by_optimizer(live: Any, tree: Tree, entries: tuple[Entry, ...], name: str) -> list[str]:
    groups = _item(tree, "param_groups")
    params = [_item(group, "params") for group in groups[1]] if groups[0] == "l" else []
    if groups[0] != "l" or any(listed[0] != "l" for listed in params):
        return []
    saved, given = [len(listed[1]) for listed in params], [len(group["params"]) for group in live.param_groups]
    if saved != given:
        return [f"{name or '(the state itself)'}: an optimizer of groups of {saved} parameters in the checkpoint, of "
                f"{given} in the state given"]  # fmt: skip
    reasons = []
    for number, like in _matched(_given(live), tree):
        if not isinstance(like, _StateOf):
            reasons += _unlike(entries[number], like, entries[number].name)
        elif like.parameter.device.type == "meta":  # the state would be made there, too
            reasons += _unlike(entries[number], like.parameter, entries[number].name)
    return reasons


def _item(tree: Tree, key: str) -> Tree:
    tree = inside(tree)
    return next((sub for saved, sub in tree[1] if saved == key), [""]) if tree[0] == "d" else [""]


def _is_optimizer(live: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(live, torch.optim.Optimizer)


def _loads_as_torch_does(live: Any) -> bool:
    if not _is_optimizer(live):
        return False
    optimizer_class = sys.modules["torch"].optim.Optimizer
    if type(live).load_state_dict is not optimizer_class.load_state_dict or "load_state_dict" in vars(live):
        return False  # for example accelerate's, which only has the class of one
    return not (live._optimizer_load_state_dict_pre_hooks or live._optimizer_load_state_dict_post_hooks)


# Loading


def copies_what_it_loads(live: Any, tree: Tree) -> bool:
    """Whether an object copies every tensor that it loads, like a module that loads as torch's do."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(live, torch.nn.Module):
        return False
    if torch.__future__.get_swap_module_params_on_conversion():  # then parameters are replaced by what is loaded
        return False
    tree = inside(tree)
    if tree[0] != "d" or any(str(key).endswith("_extra_state") for key, _ in tree[1]):
        return False
    return _wanted(torch, live) is not None


def own_tensors(live: Any, tree: Tree, entries: tuple[Entry, ...]) -> dict[int, Any]:
    """Find the tensors of an optimizer that saved ones can be copied into, by number of the entry.

    Loading then keeps them in place: no memory is taken for the state a second time. Not collective, but calls
    ``state_dict()``.
    """
    if not _loads_as_torch_does(live):
        return {}
    starts = collections.Counter(entry.start for entry in entries)  # tied tensors must be tied again
    own, places = {}, []
    for number, tensor in _matched(_given(live), tree):
        entry = entries[number]
        if isinstance(tensor, _StateOf) or tensor.requires_grad or not entry.nbytes or starts[entry.start] > 1:
            continue
        try:
            local, local_entry, place = tensor_entry(sys.modules["torch"], tensor, entry.name)
        except StateError:
            continue
        if place and local.is_contiguous() and msgspec.structs.replace(local_entry, start=entry.start) == entry:
            own[number] = tensor
            places.append((place[0], place[1], place[1] + entry.nbytes))
    places.sort()
    if any(place[0] == after[0] and place[2] > after[1] for place, after in itertools.pairwise(places)):
        return {}
    return own


def load(live: Any, saved: Any, name: str) -> None:
    """Load a saved state into an object, bit for bit. Raises StructureMismatch if it does not load, or is on meta."""
    try:
        live.load_state_dict(saved)
    except MlflashError:
        raise
    except Exception as error:
        raise StructureMismatch(f"loading failed: {text_of(error)}", tensor=name or "(the state itself)") from error
    forget_early_iterator(live)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(live, torch.nn.Module):
        _refuse_meta(live, saved, name)
    if not _loads_as_torch_does(live):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in live.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        loaded, as_saved = live.state.get(param), saved["state"].get(number)
        if not isinstance(loaded, dict) or not isinstance(as_saved, dict):
            continue
        _uncast(loaded, as_saved)


def _refuse_meta(live: Any, saved: Any, name: str) -> None:
    for key, tensor in itertools.chain(live.named_parameters(), live.named_buffers()):
        if tensor.device.type == "meta" and key in saved:
            raise StructureMismatch("this tensor is on the meta device, where nothing can be loaded: call to_empty() "
                                    "first", tensor=f"{name}.{key}" if name else key)  # fmt: skip


def _uncast(loaded: Any, saved: Any) -> Any:
    """Undo torch's cast of an optimizer's state to the dtype of the parameter: moments may have another on purpose."""
    if is_tensor(saved) and is_tensor(loaded):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        loaded.update({key: _uncast(loaded[key], value) for key, value in saved.items()})
    elif isinstance(saved, list):
        loaded[:] = [_uncast(item, value) for item, value in zip(loaded, saved, strict=True)]
    elif type(saved) is tuple:
        return tuple(_uncast(item, value) for item, value in zip(loaded, saved, strict=True))
    return loaded


# What saved tensors of optimizers look like


@dataclasses.dataclass(frozen=True)
class _StateOf:
    """The state of a parameter, of which an optimizer has made some, or nothing yet."""

    parameter: Any
    made: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    def get(self, key: Any) -> Any:
        return self.made.get(key, None if key in _PER_STEP else _StateOf(self.parameter))


def patterns(live: Any, tree: Tree, entries: tuple[Entry, ...]) -> dict[int, Any]:
    """Find the live tensors that have the form of the saved ones of an object, by number of their entries.

    Not collective, but calls ``state_dict()``. If an optimizer has not made the state of a parameter, the parameter
    itself gives the form for everything that has its shape.

    Raises:
        StructureMismatch: an optimizer has not made a tensor that was saved in shards, and no parameter is like it.
    """
    like_of: dict[int, Any] = {}
    for number, like in _matched(_given(live), tree):
        if not isinstance(like, _StateOf):
            like_of[number] = like
        elif entries[number].mesh is not None and is_like(entries[number], like.parameter):
            like_of[number] = like.parameter
        elif _is_dtensor(like.parameter) and entries[number].shape != entries[number].global_shape:
            raise StructureMismatch(
                "this tensor was saved in shards, and the optimizer has not created it yet: create the "
                "optimizer's state first (see mlflash.adapters.fsdp.init_optim_state)", tensor=entries[number].name,
            )  # fmt: skip
    return like_of


@dataclasses.dataclass(frozen=True)
class _Wrapped:
    """A DTensor that was saved, and is made of tensors that wrap others."""

    like: Any
    attributes: Mapping[str, Any]


def wrapped_patterns(live: Any, tree: Tree, entries: tuple[Entry, ...]) -> dict[int, Any]:
    """Find a live DTensor for each that was saved of an object and is made of tensors that wrap others.

    Not collective, but calls ``state_dict()``.

    Returns:
        By the number of the first entry that was saved of it: the live one, or the parameter whose state it is.

    Raises:
        StructureMismatch: that is cut differently.
    """
    like_of: dict[int, Any] = {}
    for number, wrapped in _matched(_given(live), tree, wrapped=True):
        if not isinstance(wrapped, _Wrapped):
            continue
        like = wrapped.like.parameter if isinstance(wrapped.like, _StateOf) else wrapped.like
        name = entries[number].name
        whole, offset, shape, mesh = place_of(like, name)
        place = [mesh, list(whole), list(offset)]
        if (place, list(shape)) != (wrapped.attributes["shard"], wrapped.attributes["size"]):
            raise StructureMismatch("this tensor wraps others and was saved in shards, which are not cut anew: restore "
                                    "on the ranks and in the shards that saved it", tensor=name,
                                    expected=wrapped.attributes["shard"], found=place)  # fmt: skip
        like_of[number] = like
    return like_of


def dtensors_in(lives: Iterable[Any]) -> dict[Any, Any]:
    """DTensors in containers, modules and optimizers, by mesh, global shape, offset and shape; no ``state_dict()``."""
    dtensors: dict[Any, Any] = {}
    torch = sys.modules["torch"]
    stack = list(lives)
    while stack:
        live = stack.pop()
        if isinstance(live, torch.nn.Module):
            stack += [*live.parameters(), *live.buffers()]
        elif _is_optimizer(live):
            stack += [parameter for group in live.param_groups for parameter in group["params"]]
        elif isinstance(live, (dict, list, tuple)):
            stack += live.values() if isinstance(live, dict) else live
        elif is_tensor(live) and _is_dtensor(live) and live.device.type != "meta":
            try:
                whole, offset, shape, mesh = place_of(live, "")
            except StateError:  # for example, a partial placement
                continue
            dtensors.setdefault((mesh, whole, offset, shape), live)
    return dtensors


def parameters(state: Any, tree: Tree) -> dict[int, Any]:
    """Find the parameter of each tensor that was saved of an optimizer's state, by entry. Calls ``state_dict()``."""
    return {n: like.parameter for n, like in _matched(state, tree, optimizers=True) if isinstance(like, _StateOf)}


def is_like(entry: Entry, parameter: Any) -> bool:
    """Whether a saved tensor is like a parameter: it has its shape, and was a DTensor if that is one."""
    return (entry.mesh is not None or not _is_dtensor(parameter)) and has_shape_of(entry, parameter)


def has_shape_of(entry: Entry, parameter: Any) -> bool:
    """Whether a saved tensor, or the shard that was saved of it, has the shape of a parameter."""
    local = tuple((parameter.detach().to_local() if _is_dtensor(parameter) else parameter).shape)
    return entry.global_shape == tuple(parameter.shape) or entry.shape == entry.global_shape == local


def _matched(like: Any, tree: Tree, optimizers: bool = False, wrapped: bool = False) -> Iterator[tuple[int, Any]]:
    """Pairs of saved and live tensors; with ``optimizers`` only what these have, as if they had made nothing.

    With ``wrapped``, there is a `_Wrapped` for each DTensor of tensors that wrap others, by the first that these wrap.
    """
    if is_object(like):
        like = None if optimizers and not _is_optimizer(like) else _given(like, made=not optimizers)
    tag, rest = tree[0], tree[1]
    pairs: Iterable[tuple[Any, Tree]] = ()
    if tag == "k" and tree[2][0] == WRAPPED:
        if wrapped and "shard" in tree[3] and (is_tensor(like) or isinstance(like, _StateOf)):
            yield next(sub[1] for _, sub in rest[1] if sub[0] == "e"), _Wrapped(like, tree[3])
        return  # what it wraps is like no parameter
    if tag in ("o", "k"):
        pairs = [(like, rest)]
    elif tag == "e" and (is_tensor(like) or isinstance(like, _StateOf)):
        yield rest, like
    elif tag == "d" and isinstance(like, (dict, _StateOf)):
        pairs = [(like.get(decode_plain(key)), sub) for key, sub in rest]
    elif tag in ("l", "t") and isinstance(like, _StateOf):
        pairs = [(like, sub) for sub in rest]
    elif tag in ("l", "t") and isinstance(like, (list, tuple)) and len(like) == len(rest):
        pairs = zip(like, rest, strict=True)
    for part, sub in pairs:
        yield from _matched(part, sub, optimizers, wrapped)


def _given(live: Any, made: bool = True) -> Any:
    """What an object returns, and what it would return with all of its state; or as if none were ``made``."""
    given = {} if has_not_begun(live) else live.state_dict()
    if not _is_optimizer(live) or not isinstance(given, dict) or not {"state", "param_groups"} <= given.keys():
        return given
    state = dict(given["state"])
    for group, named in zip(live.param_groups, given["param_groups"], strict=True):
        for parameter, number in zip(group["params"], named["params"], strict=True):
            has = state.get(number, {}) if made else {}
            if isinstance(has, dict):
                state[number] = _StateOf(parameter, has)
    return {**given, "state": state}


def _is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor"
