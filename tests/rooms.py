"""The rooms of mlflash, which are folders and a few files, and which of them may import from which."""

from __future__ import annotations

# Each room, and the rooms that it may import from. `errors`, `crash_points` and `version` are for all.
ROOMS: dict[str, str] = {
    "state": "",
    "storage": "state",
    "placement": "",
    "config": "storage placement",
    "memory": "state",
    "wire": "placement",
    "telemetry": "memory",
    "redundancy": "state placement config memory wire",
    "runtime": "state placement config memory wire telemetry redundancy",
    "recovery": "state memory wire redundancy runtime",
    "saving": "state config memory wire redundancy runtime recovery",
    "draining": "state storage config memory wire runtime recovery saving",
    "restoring": "state storage memory wire redundancy runtime recovery saving draining",
    "facade": "state storage placement config wire runtime recovery saving draining restoring",
    "checkpointer": "config wire runtime saving draining restoring facade",
}
# What people use, above all of it.
TOOLS: dict[str, str] = {
    "terminal": "state storage placement config memory wire draining",
    "exports": "terminal checkpointer state storage config memory wire recovery draining",
    "planning": "terminal state placement memory redundancy",
    "doctor": "terminal planning placement config memory wire redundancy runtime draining",
    "running": "terminal config memory telemetry",
    "demo": "running config memory placement",
    "top": "terminal running memory telemetry",
    "reporting": "terminal planning",
    "commands": "terminal doctor demo checkpointer state storage config memory wire redundancy draining",
}
FOR_ALL = {"errors", "crash_points", "version"}
STARTS = {"__init__", "__main__", "cli", "rng"}
