"""The packages of mlflash, which are folders and a few files, and which of them may import from which."""

from __future__ import annotations

# Each package, and those that it may import from. `errors`, `crash_points`, `events`, `text` and `version` are for all.
PACKAGES: dict[str, str] = {
    "state": "",
    "placement": "",
    "memory": "state",
    "storage": "state",
    "mpi": "placement",
    "config": "placement storage",
    "telemetry": "memory",
    "framework_files": "memory",
    "protect": "state placement memory mpi",
    "launch": "placement memory",
    "channel": "state placement memory mpi config telemetry protect launch",
    "save": "state memory protect channel",
    "commit": "state placement memory mpi config telemetry protect channel",
    "drain": "state memory storage mpi config protect launch channel commit",
    "restore": "state memory storage mpi protect channel save commit drain",
    "courier": "placement memory mpi config protect launch channel commit drain restore",
    "run": "memory config telemetry launch",
    "checkpointer": "state memory config telemetry framework_files launch channel save drain restore run",
    "tools": "state placement memory storage mpi config telemetry framework_files protect launch channel commit drain "
    "restore run checkpointer",
}
