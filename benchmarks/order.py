"""The cost of one index of the order, beside shuffling a list. Run: python -m benchmarks.order"""

from __future__ import annotations

import random

from benchmarks.measure import cost, memory, show
from treetune.core.interleave import Interleave
from treetune.core.order import locate


def shuffle(count: int) -> None:
    positions = list(range(count))
    random.Random(0).shuffle(positions)


def main() -> None:
    draws = 20_000
    for count in (10, 64, 65, 1000, 10**6, 10**8):
        within = cost(lambda count=count: [locate(i % count, count, 7) for i in range(draws)], per=draws)
        firsts = cost(lambda count=count: [locate(i * count, count, 7) for i in range(draws)], per=draws)
        show(f"order: one index of {count:,}", within, target="7 us")
        show(f"order: an epoch's first of {count:,}", firsts, target="20 us")
    one_million = cost(lambda: shuffle(10**6), repeat=2)
    show("order: first index of 1,000,000", cost(lambda: locate(0, 10**6, 1)), "random.shuffle of a list", one_million)
    for count in (10, 10**6, 10**8):
        used = memory(lambda count=count: [locate(i, count, 11) for i in range(1000)] and None)
        print(f"order: peak memory of 1,000 draws from {count:>11,}: {used / 1024:8.1f} KiB")
    print(f"  beside: a shuffled list of   1,000,000: {memory(lambda: shuffle(10**6)) / 1024:8.1f} KiB")
    mix = Interleave([3, 1, 2], 7)
    show("mixture: next index", cost(lambda: [mix.at(i) for i in range(draws)], per=draws))
    jumps = [random.Random(0).randrange(10**12) for _ in range(2000)]
    show("mixture: any index", cost(lambda: [mix.at(i) for i in jumps], per=len(jumps)))


if __name__ == "__main__":
    main()
