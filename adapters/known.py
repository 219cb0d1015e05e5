"""The tables of what a pickle of an adapter may make, by exact names, and how. Everything else is refused.

A pickle is a program: it names functions to call, their arguments, and attributes to set. Each name here is in exactly
one table, and each table allows one way to make objects. No object made in these ways reads a file, starts anything or
runs code that the pickle chose. A name is that of the class itself. A class that is found through another module is
unknown.

    CALLED    called with the arguments in the pickle; they only keep these arguments
    DATA      made without arguments and without a call of the constructor, then given attributes
    ENUMS     members of enumerations, looked up by their value
    VALUES    used as they are, and never called
"""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import math
import pathlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_HERE = __name__


def numpy_dtype(text: str) -> np.dtype[Any]:
    """Make a dtype from its `str`, such as ``"<i4"``. Refuse objects, and fields, which could contain objects."""
    found: np.dtype[Any] = np.dtype(_checked(text, str))
    if found.hasobject or found.names is not None or found.subdtype is not None:
        raise TypeError(f"the dtype {text} is refused: it contains objects or fields")
    return found


def numpy_array(text: str, shape: tuple[int, ...], raw: bytes) -> np.ndarray:
    """Make an array from its bytes in C order."""
    dtype = numpy_dtype(text)
    if math.prod(shape) * dtype.itemsize != len(_checked(raw, bytes)):
        raise ValueError("an array does not have as many bytes as its shape needs")
    return np.ndarray(shape, dtype=dtype, buffer=raw).copy() if raw else np.zeros(shape, dtype=dtype)


def numpy_objects(shape: tuple[int, ...], values: list[Any]) -> np.ndarray:
    """Make an array of objects."""
    made = np.empty(shape, dtype=object)
    if made.size != len(_checked(values, list)):
        raise ValueError("an array does not have as many objects as its shape needs")
    for number, value in enumerate(values):  # one by one, because NumPy would otherwise look into the objects
        made.flat[number] = value
    return made


def numpy_scalar(text: str, raw: bytes) -> np.generic:
    """Make a NumPy number from its bytes."""
    made: Any = numpy_array(text, (), raw)[()]
    return made  # type: ignore[no-any-return]


def of_torch(name: str) -> Any:
    """Give torch's dtype, layout or memory format of this name."""
    found = torch.__dict__.get(_checked(name, str))
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"torch.{name} is not a dtype, layout or memory format")
    return found


def parameter(data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """Make a parameter from a plain tensor."""
    return torch.nn.Parameter(_checked(data, torch.Tensor), _checked(requires_grad, bool))


def file_in_memory(content: bytes, position: int) -> io.BytesIO:
    """Make a file in memory with its content and position."""
    made = io.BytesIO(_checked(content, bytes))
    made.seek(_checked(position, int))
    return made


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, {type(value).__name__} found")
    return value


def reduced(value: Any) -> Any:
    """Give the function above that makes a value again, and its arguments. None: no function does.

    Raises:
        TypeError: the value would not be restored exactly.
    """
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return of_torch, (str(value).removeprefix("torch."),)
    if type(value) is np.ndarray and value.dtype == object:
        return numpy_objects, (value.shape, value.reshape(-1).tolist())
    if type(value) is np.ndarray:
        return numpy_array, (_text(value.dtype), value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return numpy_scalar, (_text(value.dtype), value.tobytes()[: value.dtype.itemsize])  # np.str_("") has more bytes
    if isinstance(value, np.dtype):
        return numpy_dtype, (_text(value),)
    if type(value) is io.BytesIO:
        return file_in_memory, (value.getvalue(), value.tell())
    return None


def _text(dtype: np.dtype[Any]) -> str:
    if numpy_dtype(dtype.str) != dtype:
        raise TypeError(f"a checkpoint cannot keep NumPy's dtype {dtype}")
    return str(dtype.str)


CALLED: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "range"): range,
    ("builtins", "set"): set,
    ("builtins", "slice"): slice,
    ("collections", "Counter"): collections.Counter,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("datetime", "date"): datetime.date,
    ("datetime", "datetime"): datetime.datetime,
    ("datetime", "time"): datetime.time,
    ("datetime", "timedelta"): datetime.timedelta,
    ("datetime", "timezone"): datetime.timezone,
    ("decimal", "Decimal"): decimal.Decimal,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # Python 3.13
    ("pathlib._local", "PurePosixPath"): pathlib.PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    **{
        (_HERE, made.__name__): made
        for made in (numpy_array, numpy_dtype, numpy_objects, numpy_scalar, of_torch, parameter, file_in_memory)
    },
}

_TE = "transformer_engine.pytorch.tensor"
METHODS = {
    (f"{_TE}.float8_tensor", "Float8Tensor._make_in_reduce_ex"),
    (f"{_TE}.mxfp8_tensor", "MXFP8Tensor._make_in_reduce_ex"),
    (f"{_TE}.float8_blockwise_tensor", "Float8BlockwiseQTensor._make_in_reduce_ex"),
    (f"{_TE}.nvfp4_tensor", "NVFP4Tensor._make_in_reduce_ex"),
}
"""Functions of packages that are not imported here, called like CALLED. They make a quantized tensor from its parts."""

_MCORE = "megatron.core.dist_checkpointing"
_NVRX = "nvidia_resiliency_ext.checkpointing.local.basic_state_dict"
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
DATA = {
    "argparse": {"Namespace"},
    f"{_MCORE}.mapping": {"LocalNonpersistentObject", "ShardedObject", "ShardedTensor", "ShardedTensorFactory"},
    f"{_MCORE}.tensor_aware_state_dict": {"MCoreTensorAwareStateDict"},
    "megatron.core.rerun_state_machine": {"Call", "Caller", "QuickStats"},
    "megatron.core.transformer.pipeline_parallel_layer_layout": {"PipelineParallelLayerLayout"},
    _NVRX: {"BasicTensorAwareStateDict", "TensorPlaceholder"},
    f"{_TE}.float8_tensor": {"Float8CurrentScalingQuantizer", "Float8Quantizer"},
    f"{_TE}.mxfp8_tensor": {"MXFP8Quantizer"},
    f"{_TE}.float8_blockwise_tensor": {"Float8BlockQuantizer"},
    f"{_TE}.nvfp4_tensor": {"NVFP4Quantizer"},
    "lightning.fabric.utilities.data": {"AttributeDict"},
    "lightning.pytorch.utilities.parsing": {"AttributeDict"},
    "lightning_fabric.utilities.data": {"AttributeDict"},
    "pytorch_lightning.utilities.parsing": {"AttributeDict"},
    _SCALER: {"DynamicLossScaler", "LossScaleConfig", "LossScaler"},
    "deepspeed.utils.tensor_fragment": {"fragment_address", "tensor_fragment"},
}

_OF_LIGHTNING = {
    "callbacks.early_stopping": {"EarlyStoppingReason"},
    "callbacks.timer": {"Interval"},
    "trainer.states": {"RunningStage", "TrainerFn", "TrainerStatus"},
    "utilities.enums": {"GradClipAlgorithmType"},
}
ENUMS = {
    "signal": {"Handlers", "Signals"},
    "megatron.core.enums": {"Fp4Recipe", "Fp8Recipe", "ModelType"},
    "megatron.core.inference.config": {
        "AsyncScheduleMode", "CudaGraphSizingDistribution", "KVCacheManagementMode", "PrefixCachingCoordinatorPolicy",
        "PrefixCachingEvictionPolicy",
    },
    "megatron.core.rerun_state_machine": {"RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus"},
    "megatron.core.tensor_parallel.generalized_tensor_parallelism": {"GTPChain"},
    "megatron.core.transformer.enums": {
        "AttnBackend", "AttnMaskType", "AttnType", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope",
        "LayerType", "ModelType",
    },
    **{
        f"{package}.{module}": names
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, names in _OF_LIGHTNING.items()
    },
    _SCALER: {"LossScaleProfile"},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.runtime.zero.offload_config": {"OffloadDeviceEnum"},
}  # fmt: skip
VALUES = {"builtins": {"bool", "bytes", "dict", "float", "int", "list", "str", "tuple"}, "numpy": {"ndarray"}}
