"""Recipes of `nemo.collections.llm` on CPUs: `llm.pretrain`, `pretrain_recipe` and a model of NeMo's, as they are.

Left out are NeMo-Run (Fiddle's configurations, of which its own are made, are in its place), and what a pretraining
does not use: fine-tuning, PEFT, ModelOpt, exports, and tokenizers. So none of the packages that these want is needed.
Import this before anything of NeMo.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo
import nemo_on_cpu
from left_out import leave_init_out, leave_out, put

_IN = "nemo.collections"


def _as_it_is(function: Any = None, **kwargs: Any) -> Any:
    """In the place of NeMo-Run's decorators, which let its command line know of a function."""
    return function or (lambda function: function)


leave_init_out(Path(nemo.__file__).parent, f"{_IN}.llm", f"{_IN}.llm.gpt", f"{_IN}.llm.gpt.data",
               f"{_IN}.llm.gpt.model", f"{_IN}.llm.recipes", f"{_IN}.common")  # fmt: skip
leave_out(f"{_IN}.llm.gpt.data.fine_tuning", f"{_IN}.llm.gpt.data.packed_sequence", f"{_IN}.llm.peft",
          f"{_IN}.llm.modelopt", f"{_IN}.llm.modelopt.model_utils", f"{_IN}.llm.recipes.finetune_default",
          f"{_IN}.common.tokenizers", "nemo.export.trt_llm.nemo_ckpt_loader.nemo_file")  # fmt: skip
_run: Any = put("nemo_run", types.ModuleType("nemo_run"))
_run.Config, _run.Partial, _run.autoconvert = fdl.Config, fdl.Partial, _as_it_is
_run.cli = types.SimpleNamespace(factory=_as_it_is, entrypoint=_as_it_is)
from nemo.collections.llm import api as llm  # noqa: E402
from nemo.collections.llm.recipes import llama32_1b  # noqa: E402

__all__ = ["llama32_1b", "llm", "nemo_on_cpu"]
