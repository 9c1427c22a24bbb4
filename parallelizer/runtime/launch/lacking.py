"""Names the ranks that lack a collective in which others wait, from the ranks' records.

With NCCL a rank calls a collective and goes on, and waits where it reads a value back. So the stacks of waiting ranks do not
tell in which collective they wait, but their records do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelizer.runtime.launch.lookout import ranks_text
from parallelizer.runtime.launch.records import CollectiveRecord, RecordedCall

MOST = 4
"""Collectives that are named. Behind the first, others wait too."""

_EQUAL = {"all-reduce", "all-gather", "reduce-scatter", "broadcast"}
"""Collectives to which every rank gives a tensor of the same size."""


@dataclass(frozen=True)
class _Stall:
    """A call that has not ended: the ranks that have called it, and those that have not."""

    members: tuple[int, ...]
    call: RecordedCall
    waiting: Mapping[int, RecordedCall]
    lacking: frozenset[int]
    unknown: frozenset[int]

    @property
    def is_known(self) -> bool:
        """Whether the records tell why it has not ended."""
        return bool(self.lacking or self.unknown or len(self.forms()) > 1)

    def forms(self) -> dict[object, list[int]]:
        """The ranks that wait, by what they have called, most ranks first. A send matches its receive."""
        forms: dict[object, list[int]] = {}
        for rank, call in sorted(self.waiting.items()):
            sizes = call.sizes if set(call.kinds) <= _EQUAL else None
            forms.setdefault(None if call.is_message else (call.kinds, sizes), []).append(rank)
        return dict(sorted(forms.items(), key=lambda form: -len(form[1])))


def describe(
    records: Mapping[int, CollectiveRecord],
    unreadable: Mapping[int, str],
    places: Mapping[int, str] | None = None,
) -> list[str]:
    """A line for each collective that has not ended: who lacks it, who waits in it, and where.

    `unreadable` are the reasons for records that cannot be read, and `places` the places at which ranks are now, where they
    are known. Empty without records.
    """
    stalls = [stall for group in _groups(records) for stall in _stalls(group, records)]
    known = [stall for stall in stalls if stall.is_known] or stalls
    waiting = {rank for stall in known for rank in stall.waiting}
    # A rank that waits itself, in another collective, is behind for that reason.
    known.sort(key=lambda stall: (bool(stall.lacking) and stall.lacking <= waiting, -len(stall.waiting)))
    lines = [_line(stall, records, places or {}) for stall in known[:MOST]]
    if len(known) > MOST:
        lines.append(f"{len(known) - MOST} other collectives have not ended either")
    return [*lines, *(f"the record of rank {rank} cannot be read: {why}" for rank, why in unreadable.items())]


def _groups(records: Mapping[int, CollectiveRecord]) -> list[tuple[str, tuple[int, ...] | None]]:
    """Every group by its name and ranks: groups of different ranks may have the same name."""
    groups = {
        (call.group, record.groups.get(call.group)): None
        for _, record in sorted(records.items())
        for call in record.calls
    }
    return list(groups)


def _stalls(
    group: tuple[str, tuple[int, ...] | None], records: Mapping[int, CollectiveRecord]
) -> Iterator[_Stall]:
    name, ranks = group
    calls = {
        rank: [call for call in record.calls if call.group == name]
        for rank, record in records.items()
        if ranks is None or rank in ranks
    }
    if (
        ranks is None
    ):  # gloo's records do not tell the ranks of a group: those that have called something in it
        ranks = tuple(sorted(rank for rank, of_rank in calls.items() if of_rank))
    for messages in (False, True):
        chosen = {
            rank: {call.number: call for call in calls.get(rank, ()) if call.is_message is messages}
            for rank in ranks
        }
        open_numbers = [n for of_rank in chosen.values() for n, call in of_rank.items() if not call.ended]
        if open_numbers:
            number = min(open_numbers)
            waiting = {rank: of_rank[number] for rank, of_rank in chosen.items() if number in of_rank}
            members = ranks if not messages else _peers(ranks, waiting)
            if members:
                behind = {r for r in members if r in records and max(chosen[r], default=0) < number}
                yield _Stall(
                    members,
                    next(call for call in waiting.values() if not call.ended),
                    {r: call for r, call in waiting.items() if not call.ended},
                    frozenset(behind),
                    frozenset(members) - records.keys(),
                )


def _peers(ranks: tuple[int, ...], waiting: Mapping[int, RecordedCall]) -> tuple[int, ...]:
    """The ranks between which messages of one number travel; none where ranks number their messages differently: single
    messages in a group of more than two ranks.
    """
    if len(ranks) > 2 and any(len(call.peers) < 3 and len(call.kinds) < 2 for call in waiting.values()):
        return ()
    return tuple(sorted({ranks[peer] for call in waiting.values() for peer in call.peers}))


def _line(stall: _Stall, records: Mapping[int, CollectiveRecord], places: Mapping[int, str]) -> str:
    (_, first), *others = stall.forms().items()
    what = f"{_text(stall.waiting[first[0]])} of {_group_text(stall)}"
    waits = (
        f"{ranks_text(first)} {'waits' if len(first) == 1 else 'wait'}{_at(stall.waiting[first[0]].place)}"
    )
    if stall.lacking:
        lack = "lacks" if len(stall.lacking) == 1 else "lack"
        parts = [f"{ranks_text(stall.lacking)} {lack} {what}, in which {waits}"]
    else:
        parts = [
            f"{ranks_text(first)} {'waits' if len(first) == 1 else 'wait'} in {what}{_at(stall.waiting[first[0]].place)}"
        ]
    for _, ranks in others:
        call = stall.waiting[ranks[0]]
        kind = (
            _text(call)
            if call.kinds != stall.waiting[first[0]].kinds
            else "the same with tensors of other sizes"
        )
        parts.append(
            f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {kind} instead{_at(call.place)}"
        )
    for rank in sorted(stall.lacking)[:MOST]:
        if rank in places:
            parts.append(f"rank {rank} is in {places[rank]}")
        elif records[rank].calls:
            last = records[rank].calls[-1]
            of = _described(last.description)
            parts.append(f"rank {rank} called {_text(last)}{f' of {of}' if of else ''} last{_at(last.place)}")
    if stall.unknown:
        have = "has" if len(stall.unknown) == 1 else "have"
        parts.append(f"{ranks_text(stall.unknown)} {have} written no record")
    elif not stall.is_known:
        parts.append("all of its ranks have called it, and it has not ended")
    return "; ".join(parts)


def _text(call: RecordedCall) -> str:
    return f"{'message' if call.is_message else ' and '.join(call.kinds)} {call.number}"


def _group_text(stall: _Stall) -> str:
    described = _described(stall.call.description)
    return f"{described} ({ranks_text(stall.members)})" if described else ranks_text(stall.members)


def _described(description: str) -> str | None:
    """The mesh's axis. DeviceMesh describes the group of an axis as `mesh_<axis>`."""
    if description.startswith("mesh_"):
        return f"axis {description.removeprefix('mesh_')}"
    return "the whole world" if description == "default_pg" else None


def _at(place: str | None) -> str:
    return f" at {place}" if place else ""
