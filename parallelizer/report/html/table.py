"""Tables of a page, as every part of it writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallelizer.report.html.markup import Child, Markup, tag


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    searched: bool = False,
    axes: Sequence[str] = (),
    cards: bool = True,
) -> Markup:
    """A table whose first column heads its rows.

    A head with `#` in front is one of numbers, one with `*` of long texts; one of `axes` has the axis's
    colour. On narrow screens each row of `cards` becomes a block. `searched` rows are those that the search
    box filters.
    """
    # Roles are written out because a table that is laid out as blocks is no table to a screen reader.
    names = [h.lstrip("#*") for h in heads]
    kinds = [{"#": "number", "*": "wide"}.get(h[:1]) for h in heads]
    header = [
        tag("th", swatch(name) if name in axes else None, name, scope="col", class_=kind, role="columnheader")
        for name, kind in zip(names, kinds, strict=True)
    ]
    body = []
    for first, *rest in rows:
        cells = [tag("th", first, scope="row", class_=kinds[0], role="rowheader")]
        for cell, name, kind in zip(rest, names[1:], kinds[1:], strict=True):
            cells.append(tag("td", cell, class_=kind, data_label=name, role="cell"))
        body.append(tag("tr", cells, role="row"))
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", header, role="row"), role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        class_=" ".join(n for n, on in (("cards", cards), ("searched", searched)) if on) or None,
        role="table",
    )
    return tag("div", whole, class_="scroll")


def css_class(axis: str) -> str:
    """The class that colours an axis; a folded axis has the colour of its first."""
    return f"x-{axis.partition('+')[0]}"


def swatch(axis: str) -> Markup:
    """A small square in the colour of an axis."""
    return tag("span", class_=f"swatch {css_class(axis)}")
