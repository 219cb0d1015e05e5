"""Trains recipes of NeMo on CPUs: ``nemo_recipe.py RUNS``, a JSON list of the arguments of `nemo_recipe_job.train`."""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    from nemo_recipe_job import main

    main(json.loads(sys.argv[1]))
