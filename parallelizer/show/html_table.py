"""Tables of a page, as every part of it writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallelizer.show.markup import Child, Markup, tag


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    searched: bool = False,
    axes: Sequence[str] = (),
    cards: bool = True,
) -> Markup:
    """A table whose first column heads its rows. A head with `#` in front is one of numbers, one of `axes` has the axis's colour.

    On narrow screens each row of `cards` becomes a block. `searched` rows are those that the search box filters.
    """
    names = [h.removeprefix("#") for h in heads]
    kinds = ["number" if h.startswith("#") else None for h in heads]
    header = [
        tag("th", tag("span", class_=f"swatch {css_class(n)}") if n in axes else None, n, scope="col", class_=kind, role="columnheader")
        for n, kind in zip(names, kinds, strict=True)
    ]
    body = [
        tag("tr", [
            tag("th" if i == 0 else "td", cell, scope="row" if i == 0 else None, class_=kinds[i], data_label=names[i],
                role="rowheader" if i == 0 else "cell")
            for i, cell in enumerate(row)
        ], role="row")
        for row in rows
    ]  # fmt: skip
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", header, role="row"), role="rowgroup"),
            tag("tbody", body, role="rowgroup"),
            class_=" ".join(n for n, on in (("cards", cards), ("searched", searched)) if on) or None,
            role="table",
        ),
        class_="scroll",
    )


def css_class(axis: str) -> str:
    """The class that colours an axis; a folded axis has the colour of its first."""
    return f"x-{axis.partition('+')[0]}"
