"""Simulate the histories of some seeds: `python tests/simulation 0:1000`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import sys
import time
from collections import Counter
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same in each run
    os.environ.update(PYTHONHASHSEED="0", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

import machine

machine.install()

from history import History  # noqa: E402
import threads

monotonic = threads.REAL_TIME["monotonic"]

def run_seed(seed: int, fixed: dict[str, object], keeps_trace: bool = False) -> dict[str, Any]:
    gc.disable()
    began = time.process_time()
    history = History(seed, fixed, keeps_trace)
    history.run()
    kernel = history.kernel
    return {
        "seed": seed, "problems": history.problems, "digest": kernel.digest.hexdigest(), "points": kernel.points,
        "seconds": kernel.now, "cpu": time.process_time() - began, "outcomes": dict(history.outcomes),
        "reached": dict(history.reached), "kills": dict(history.kills), "setting": str(history.setting), "trace": kernel.trace,
    }

def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds")
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    fixed = {k: json.loads(v) if v[:1] and v[0] in "0123456789[" else v for k, v in (x.split("=") for x in args.set)}
    if "special" in fixed: fixed["special"] = frozenset(fixed["special"]) if isinstance(fixed["special"], list) else frozenset(fixed["special"].split(",")) - {""}
    run_seed(3, {**fixed, "launches": 1})
    gc.collect(); gc.freeze()
    if not last:
        result = run_seed(int(first), fixed, args.trace)
        for line in result.pop("trace") or (): print(line)
        print(json.dumps(result, indent=1)); return
    total = Counter(); began = monotonic(); bad = []
    reached, kills, outcomes = Counter(), Counter(), Counter()
    for seed in range(int(first), int(last)):
        r = forked(seed, fixed)
        total["points"] += r.get("points", 0); total["cpu"] += r.get("cpu", 0)
        reached.update(r.get("reached", {})); kills.update(r.get("kills", {})); outcomes.update(r.get("outcomes", {}))
        if r["problems"]:
            bad.append(seed); print(f"--- seed {seed} {r.get('setting')}"); print("\n".join(r["problems"][:3])); sys.stdout.flush()
    n = int(last) - int(first)
    print(f"{n} seeds, {monotonic() - began:.1f} s, {1e3 * total['cpu'] / n:.0f} ms CPU each, {total['points'] / n:.0f} points")
    print("outcomes", dict(outcomes)); print("reached", len(reached)); print("kills", dict(kills))
    from mlflash import crash_points
    print("never", sorted(set(crash_points.POINTS) - set(reached)))
    print("bad", bad)

def forked(seed: int, fixed: dict[str, object]) -> dict[str, Any]:
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        try:
            text = json.dumps(run_seed(seed, fixed))
        except BaseException as error:
            import traceback
            text = json.dumps({"seed": seed, "problems": ["CHILD: " + "".join(traceback.format_exception(error))[-3000:]]})
        os.write(into, text.encode()) if len(text) < 60000 else None
        machine.exit_now(0)
    os.close(into)
    raw = b""
    end = monotonic() + 120
    while True:
        ready, _, _ = select.select([out], [], [], max(0, end - monotonic()))
        if not ready:
            os.kill(child, 9); raw = json.dumps({"seed": seed, "problems": ["the process hung"]}).encode(); break
        part = os.read(out, 1 << 20)
        if not part: break
        raw += part
    os.close(out); os.waitpid(child, 0)
    return json.loads(raw)

main()
