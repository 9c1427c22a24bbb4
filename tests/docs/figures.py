"""What a command prints, without the figures that every run has its own of."""

from __future__ import annotations

import re

_PROOF = re.compile(r"proven in \d+ s \(certificate [0-9a-f]{12}, worst error \d\.\d\d of its bound\)")
_ESTIMATE = re.compile(r"its proof should take about \d+ (s|min)")


def without_figures(text: str) -> str:
    """The text with the seconds, the certificate and the errors of a proof left out."""
    text = _PROOF.sub("proven in ... s (certificate ..., worst error ... of its bound)", text.strip())
    return _ESTIMATE.sub("its proof should take about ...", text)
