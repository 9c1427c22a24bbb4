"""Figures as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in powers of 1024: `512 B`, `1.5 KiB`, `80.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
