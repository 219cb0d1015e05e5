"""How many files and connections this process may have open."""

from __future__ import annotations

import resource


def allow(count: int) -> str:
    """Allow this process a number of open descriptors.

    Returns:
        Why that is not possible; "" if it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = hard == resource.RLIM_INFINITY
    if not is_unlimited and hard < count:
        return (
            f"needs {count} open files, and the hard limit of this host is {hard}: raise it (ulimit -Hn, or "
            "LimitNOFILE of the daemon that starts it)"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if is_unlimited else hard, hard))
    return ""
