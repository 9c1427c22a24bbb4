"""What dimensions are made of, against tensors that are taken apart for real."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.propose.from_forward.atoms import (
    ARGUMENT,
    FEATURE,
    PARAMETER,
    WHOLE,
    Atom,
    Dim,
    align,
    cut,
    fresh,
    leaves,
    size_of,
    tie,
    unify,
    view,
)


def sizes(dim: Dim) -> list[int]:
    return [atom.size for atom in leaves(dim)]


def feature(size: int) -> Dim:
    return fresh(size, FEATURE)


def test_a_view_splits_an_atom_into_heads_and_their_size_and_another_puts_them_together() -> None:
    made = feature(32)
    heads, size = view([made], [4, 8])
    (whole,) = view([heads, size], [32])
    assert (sizes(heads), sizes(size), sizes(whole)) == ([4], [8], [4, 8])
    assert leaves(made) == leaves(whole)


def test_what_is_seen_in_sizes_that_do_not_follow_its_own_cannot_be_split() -> None:
    made = feature(6)
    heads, rest = view([made], [2, 3])
    view([rest, heads], [2, 3])  # 3 x 2 seen as 2 x 3: neighbours of both
    assert leaves(made)[1].refused


def test_atoms_that_meet_are_one_and_a_refusal_of_one_holds_for_both() -> None:
    gate, up = feature(8), feature(8)
    (met,) = align(gate, up)
    leaves(up)[0].refuse("the forward sums over it", "norm")
    assert met.root() is leaves(gate)[0]
    assert leaves(gate)[0].refused == "the forward sums over it"


def test_what_may_be_split_and_meets_what_is_whole_cannot_be_split() -> None:
    made, stream = feature(8), fresh(8, WHOLE, "the residual stream")
    align(stream, made, "block")
    assert made[0].met() == ("it is combined with the residual stream", "block")


def test_a_parameter_and_an_argument_are_split_with_the_features_that_both_meet() -> None:
    made, parameter, argument = Atom(4, FEATURE), Atom(4, PARAMETER), Atom(4, ARGUMENT)
    unify(argument, parameter)
    unify(parameter, made)
    assert made.root().kind == FEATURE and made.met() is None
    assert made.group() is parameter.group() is argument.group()
    # The parameter needs a part for each rank: what is whole keeps it whole, and the features that it meets.
    other, late = Atom(4, PARAMETER), Atom(4, FEATURE)
    unify(unify(Atom(4, WHOLE), Atom(4, ARGUMENT)), other)
    unify(other, late)
    assert late.met() is not None


def test_dimensions_that_meet_are_factored_alike() -> None:
    queries, keys = view([feature(32)], [4, 8])[0], feature(4)
    met = align((*queries,), keys)
    assert sizes(met) == [4]
    flat = feature(32)
    assert sizes(align(flat, (*feature(4), *feature(8)))) == [4, 8] == sizes(flat)


def test_heads_of_queries_and_keys_are_tied_though_they_differ_in_number() -> None:
    queries, keys = Atom(8, FEATURE), Atom(2, FEATURE)
    tie(queries, keys)
    assert queries.group() is keys.group()
    other = Atom(8, FEATURE)
    unify(queries, other)
    assert other.group() is keys.group()


def test_atoms_that_are_tied_may_be_unified_without_end() -> None:
    one, other = Atom(4, FEATURE), Atom(4, FEATURE)
    tie(one, other)
    unify(other, one)
    unify(one, other)
    assert one.group() is other.group()


def test_parts_cut_from_one_atom_are_the_same_parts_each_time() -> None:
    made = feature(12)
    assert cut(made, 0, 4) == cut(made, 0, 4)
    assert cut(made, 0, 4) != cut(made, 4, 8)
    assert cut(made, 0, 12) == made


def test_a_part_across_factors_needs_the_whole() -> None:
    (flat,) = view(view([feature(12)], [3, 4]), [12])
    assert sizes(cut(flat, 4, 12)) == [2, 4]
    cut(flat, 1, 3)
    assert all(atom.refused for atom in leaves(flat))


SHAPES = st.lists(st.sampled_from([2, 3, 4, 6]), min_size=2, max_size=4)


@given(SHAPES, st.data())
def test_a_rank_that_has_its_run_of_the_outermost_atom_has_its_run_of_every_dimension_that_begins_with_it(
    factors: list[int], data: st.DataObject
) -> None:
    factors = [2 * factors[0], *factors[1:]]
    order = data.draw(st.permutations(range(len(factors))))
    ends = sorted(data.draw(st.sets(st.integers(1, len(factors) - 1))))
    bounds = list(zip([0, *ends], [*ends, len(factors)], strict=True))

    def chain(flat: torch.Tensor, outer: int) -> torch.Tensor:
        split = flat.view(outer, *factors[1:]).permute(order)
        return split.reshape([math.prod(split.shape[a:b]) for a, b in bounds])

    made = feature(math.prod(factors))
    dims = view([made], factors)
    moved = [dims[d] for d in order]
    grouped = [tuple(a for dim in moved[i:j] for a in dim) for i, j in bounds]
    whole = chain(torch.arange(math.prod(factors)), factors[0])
    assert [size_of(dim) for dim in grouped] == list(whole.shape)
    part = chain(torch.arange(math.prod(factors) // 2), factors[0] // 2)
    first = leaves(made)[0]
    for d, dim in enumerate(grouped):
        if leaves(dim)[0] is first:
            assert torch.equal(part, whole.narrow(d, 0, whole.shape[d] // 2))


@pytest.mark.parametrize("size", [1, 5])
def test_a_dimension_of_size_1_has_no_atoms(size: int) -> None:
    assert len(fresh(size)) == (size != 1)


def test_a_piece_of_one_index_meets_what_has_several() -> None:
    one = cut(fresh(4, FEATURE), 0, 1)
    assert size_of(one) == 1
    other = fresh(6, FEATURE)
    assert [a.size for a in align((*one, *fresh(6, FEATURE)), other)] == [6]
