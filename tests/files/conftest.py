from __future__ import annotations

from own_couriers import leaves_no_process  # noqa: F401
