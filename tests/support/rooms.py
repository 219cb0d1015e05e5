"""The rooms of mlflash, which are folders and a few files, and which of them may import from which."""

from __future__ import annotations

# Each room, and the rooms that it may import from. `errors`, `crash_points`, `events` and `version` are for all.
ROOMS: dict[str, str] = {
    "human_readable": "",
    "state": "",
    "placement": "human_readable",
    "storage": "state",
    "memory": "state human_readable",
    "value_checks": "state memory",
    "mpi": "placement human_readable",
    "wireup": "placement human_readable",
    "config": "placement storage",
    "telemetry": "memory",
    "redundancy": "state placement memory mpi human_readable",
    "protocol": "state placement memory mpi wireup config telemetry redundancy",
    "startup": "state placement memory mpi config telemetry redundancy protocol value_checks human_readable",
    "draining": "state storage memory mpi config redundancy protocol startup",
    "saving": "state memory redundancy protocol startup value_checks draining",
    "restoring": "state storage memory mpi redundancy protocol startup draining saving human_readable",
    "courier": "placement memory mpi wireup config redundancy protocol startup draining saving restoring",
    "background_files": "memory",
    "checkpointer": "state memory config telemetry protocol draining saving restoring background_files",
}
# What people use, above all of it.
TOOLS: dict[str, str] = {
    "in_place": "config wireup protocol checkpointer",
    "exports": "state storage protocol draining restoring",
    "inspection": "state placement storage memory mpi redundancy startup draining restoring human_readable",
    "agent": "memory wireup telemetry human_readable inspection background_files",
    "command_line": "storage memory mpi wireup config draining human_readable inspection",
    "launcher": "memory wireup config telemetry human_readable agent",
    "demo": "config launcher human_readable",
    "live_monitor": "telemetry human_readable command_line launcher",
    "planning": "state placement memory redundancy human_readable command_line",
    "log_report": "human_readable",
    "doctor": "protocol placement memory mpi wireup config redundancy startup draining checkpointer "
    "human_readable command_line launcher planning",
    "commands": "background_files placement storage memory mpi wireup config telemetry draining restoring checkpointer "
    "human_readable exports inspection command_line launcher demo live_monitor planning log_report doctor",
}
