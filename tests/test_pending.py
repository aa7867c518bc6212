"""Draws that are not done: what is given out again, and when a lease is over."""

from __future__ import annotations

import pytest
from raising import raises_code

from treetune.play.leases import Draw, Pending, PendingDraws, check_lease


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pending(clock):
    return PendingDraws(clock)


def taken(pending, stream=""):
    found = []
    while (draw := pending.take(stream)) is not None:
        found.append((draw.index, draw.attempt))
    return found


def test_what_failed_or_was_given_back_comes_again_the_lowest_first(pending):
    draws = [Draw("", index) for index in range(4)]
    for draw in draws:
        pending.hold(draw)
    pending.give_back(draws[3])
    pending.fail(draws[1], "no disk")
    pending.settle(draws[0])
    assert taken(pending) == [(1, 0), (3, 0)]
    assert taken(pending, "other") == []


def test_a_draw_of_a_stream_that_was_put_elsewhere_is_nobodys(pending):
    draw = Draw("s", 5)
    pending.hold(draw)
    pending.place("s", [])
    pending.hold(again := Draw("s", 5))  # drawn anew
    assert pending.fail(draw, "no disk") == 0
    pending.settle(draw)
    pending.give_back(draw)
    assert taken(pending, "s") == []
    pending.give_back(again)
    assert taken(pending, "s") == [(5, 0)]


def test_a_lease_that_is_neither_finished_nor_renewed_runs_out(pending, clock):
    for index in range(4):
        pending.lease(Draw("", index), task=index, seconds=10.0, holder=b"c")
    clock.now += 6
    pending.renew_task(1, b"c")
    assert pending.finish_task(2, b"c")
    assert not pending.finish_task(2, b"c")
    assert not pending.renew_task(3, b"another")
    clock.now += 6
    assert pending.expire() == []
    assert (taken(pending), pending.leased, pending.expired) == ([(0, 1), (3, 1)], 1, 2)
    pending.renew_task(1, b"c", 60.0)
    clock.now += 30
    pending.expire()
    assert pending.leased == 1


def test_work_renews_its_lease_and_the_last_to_end_finishes_it(pending, clock):
    pending.lease(Draw("", 0), task=7, seconds=10.0, holder=b"c")
    key = pending.find(7, b"c")
    for name in "ab":
        pending.begin_work(key, name)
    clock.now += 8
    pending.renew_work("a")
    clock.now += 8
    assert pending.expire() == []
    pending.end_work("a")
    assert pending.leased == 1
    pending.end_work("b")
    assert (pending.leased, len(pending)) == (0, 0)


def test_what_was_under_way_for_a_lease_that_ran_out_is_told(pending, clock):
    pending.lease(Draw("", 0), task=7, seconds=10.0, holder=b"c")
    pending.begin_work(pending.find(7, b"c"), "rollout")
    clock.now += 10
    assert pending.expire() == ["rollout"]
    pending.end_work("rollout")  # it is nobody's now
    assert taken(pending) == [(0, 1)]


def test_two_leases_on_one_task_are_two(pending, clock):
    """The same task in two epochs."""
    pending.lease(Draw("", 0), task=7, seconds=10.0, holder=b"c")
    pending.lease(Draw("", 9), task=7, seconds=10.0, holder=b"c")
    first = pending.find(7, b"c", free=True)
    pending.begin_work(first, "one")
    assert (first, pending.find(7, b"c", free=True)) == (("", 0), ("", 9))
    pending.finish_task(7, b"c")
    pending.finish_task(7, b"c")
    assert len(pending) == 0


def test_a_checkpoint_gives_out_again_what_was_on_a_lease_and_a_restart_keeps_it(pending, clock):
    pending.lease(Draw("s", 3), task=3, seconds=10.0, holder=b"c")
    pending.hold(Draw("s", 4))  # its client waits for it
    pending.hold(failed := Draw("s", 5, position=8))
    pending.fail(failed, "no disk")
    kept = pending.of("s")
    assert [(one.index, one.position, one.tries, one.seconds) for one in kept] == [(3, None, 0, 10.0), (5, 8, 1, 0.0)]
    back, restarted = PendingDraws(clock), PendingDraws(clock)
    back.place("s", kept)
    assert taken(back, "s") == [(3, 1), (5, 0)]
    restarted.place("s", kept, keep_leases=True)
    assert restarted.finish_task(3, b"c")


def test_what_changed_is_noted_for_whoever_keeps_it(pending, clock):
    pending.changed = set()
    pending.lease(Draw("", 0), task=0, seconds=10.0, holder=b"c")
    pending.renew_task(0, b"c")
    assert pending.changed == {("", 0)}
    pending.changed = set()
    pending.renew_task(0, b"c")  # when it ends is not kept
    assert pending.changed == set()
    pending.renew_task(0, b"c", 20.0)
    assert pending.get(("", 0)) == Pending(0, seconds=20.0, task=0, holder=b"c")
    assert pending.changed == {("", 0)}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_lease_has_so_many_seconds(seconds):
    with raises_code("usage", "604800"):
        check_lease(seconds)
