"""How long a copy must be to go past the processor's cache.

The C library writes around the cache only in copies of about three quarters of the last-level cache, 100 MB on a large
server: a plain copy of an image profits, a copy piece by piece does not, and fetches every line that it is about to
overwrite. A scatter of verified bytes takes half the time with a threshold of 48 KiB; gathers copy shorter units (see
`workers.pieces`), because what they write is read again at once.

The threshold can only be set before a process starts, so whoever starts the workers' template sets it. A C library that
does not know the variable ignores it, and then only time is lost.
"""

from collections.abc import Mapping
from typing import Final

THRESHOLD_BYTES: Final = 48 * 1024
_VARIABLE: Final = "GLIBC_TUNABLES"
_TUNABLE: Final = "glibc.cpu.x86_non_temporal_threshold"


def with_streaming(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that copies. A threshold that somebody chose stays."""
    given = environ.get(_VARIABLE, "")
    if _TUNABLE in given:
        return dict(environ)
    tunables = [*filter(None, [given]), f"{_TUNABLE}={THRESHOLD_BYTES:#x}"]
    return {**environ, _VARIABLE: ":".join(tunables)}
