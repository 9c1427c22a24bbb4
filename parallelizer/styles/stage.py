"""`stage`: a cut of the model into pipeline stages may fall before the module.

Where cuts fall, and what crosses them, is found while compiling (`compiler/pipeline/divide.py`). The cut is made when
the program is applied, before any other style (`runtime/pipeline/stage_models.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.styles import StyleDeclaration, declare
from parallelizer.styles.registry import applies

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.styles.application import Application, Live

declare(StyleDeclaration("stage", "stage", "pp", "allow a cut into pipeline stages before the module"))


@applies("stage")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """Nothing: the model has been cut already."""
