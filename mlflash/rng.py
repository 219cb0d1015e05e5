"""The random generators of this process as one object of the state. Importing it does not import numpy."""

from __future__ import annotations

import random
import sys
from typing import Any


class Rng:
    """State of the global generators of Python, numpy, torch and CUDA; made by :func:`rng`."""

    rank_private = True  # ranks that hold the same weights draw other numbers

    def state_dict(self) -> dict[str, Any]:
        """Read the generators. Not collective. Without a loaded torch, those of torch are left out."""
        import numpy as np

        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
            "numpy": {"name": name, "keys": keys, "position": int(position), "has_gauss": int(has_gauss),
                      "cached": float(cached)},
        }  # fmt: skip
        if (torch := sys.modules.get("torch")) is not None:
            state["torch"] = torch.get_rng_state()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators. Not collective. Generators that are not in the state stay as they are."""
        import numpy as np

        python, numpy_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(int(w) for w in python["words"]), python["gauss"]))
        np.random.set_state(
            (numpy_state["name"], numpy_state["keys"], numpy_state["position"], numpy_state["has_gauss"],
             numpy_state["cached"])
        )  # fmt: skip
        if "torch" in state:
            import torch

            torch.set_rng_state(state["torch"])
            if "cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(state["cuda"])


def rng() -> Rng:
    """Return the state of all global random generators of this rank, to be saved as part of the state.

    Not collective. It covers Python's ``random``, ``numpy.random``, torch's CPU generator and, if CUDA is in
    use, the generators of all its devices.

    Example:
        ``state = {"model": model, "optimizer": optimizer, "rng": mlflash.rng()}``
    """
    return Rng()
