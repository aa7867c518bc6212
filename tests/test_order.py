"""The order: a pure function from index to (epoch, position)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.core.order import locate

counts = st.integers(1, 3000)
seeds = st.integers(-(2**70), 2**70)


def epoch(count: int, seed: int, number: int = 0) -> list[int]:
    return [locate(number * count + offset, count, seed)[1] for offset in range(count)]


@given(counts, seeds, st.integers(0, 50))
def test_every_position_appears_exactly_once_per_epoch(count, seed, number):
    assert sorted(epoch(count, seed, number)) == list(range(count))


@given(counts, seeds, st.integers(0, 10**9))
def test_an_index_is_located_alike_however_it_is_reached(count, seed, index):
    before = locate(index, count, seed)
    for other in (index + 1, 0, index * 7 + 3):
        locate(other, count, seed)
    assert locate(index, count, seed) == before
    assert before[0] == index // count


@given(st.integers(30, 3000), seeds)
def test_epochs_differ(count, seed):
    assert epoch(count, seed, 0) != epoch(count, seed, 1)


@pytest.mark.parametrize("count", [50, 500, 5000])
def test_seeds_7_and_8_share_no_stream(count):
    """No epoch of one seed is an epoch of the other, nor a shifted copy of it."""
    of_seven = {pair for number in range(5) for pair in enumerate(epoch(count, 7, number))}
    agreeing = [
        sum((offset + shift, position) in of_seven for offset, position in enumerate(epoch(count, 8, number)))
        for number in range(5)
        for shift in (-1, 0, 1)
    ]
    # By chance each position agrees with one of five epochs with probability 5 / count.
    assert max(agreeing) < 25


def test_without_a_seed_it_is_load_order():
    assert [locate(index, 4) for index in range(6)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_all_24_orders_of_4_are_equally_frequent():
    orders = Counter(tuple(epoch(4, seed)) for seed in range(24_000))
    assert len(orders) == 24
    chi_square = sum((seen - 1000) ** 2 / 1000 for seen in orders.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


def test_all_720_orders_of_6_are_reached():
    orders = Counter(tuple(epoch(6, 0, number)) for number in range(15_000))
    assert len(orders) == 720


def structure(orders: list[list[int]]) -> list[float]:
    """How far (offset, position) pairs and the steps between neighbours are from uniform, in standard deviations."""
    count = len(orders[0])
    cells = Counter(cell for order in orders for cell in enumerate(order))
    steps = Counter((after - before) % count for order in orders for before, after in pairwise(order))
    return [
        deviation([cells[offset, position] for offset in range(count) for position in range(count)], (count - 1) ** 2),
        deviation([steps[step] for step in range(1, count)], count - 2),
    ]


def deviation(seen: list[int], freedom: int) -> float:
    mean = sum(seen) / len(seen)
    chi_square = sum((times - mean) ** 2 for times in seen) / mean
    return abs(chi_square - freedom) / sqrt(2 * freedom)


def shuffled(count: int, seed: int) -> list[int]:
    positions = list(range(count))
    random.Random(seed).shuffle(positions)
    return positions


@pytest.mark.parametrize("count", [16, 65, *(pytest.param(n, marks=pytest.mark.thorough) for n in (64, 100, 289))])
@pytest.mark.parametrize("over", ["seeds", "epochs"])
def test_there_is_no_more_structure_than_in_a_true_shuffle(count, over):
    number = 1500
    orders = [epoch(count, n) if over == "seeds" else epoch(count, 3, n) for n in range(number)]
    assert max(structure(orders)) < 4
    assert max(structure([shuffled(count, n) for n in range(number)])) < 4  # the measure itself is fair


def test_the_measure_of_structure_sees_a_bad_shuffle():
    rotations = [[(offset + n * 7919) % 65 for offset in range(65)] for n in range(1500)]
    assert max(structure(rotations)) > 100
