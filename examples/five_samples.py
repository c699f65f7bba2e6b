"""Five samples, cut 2 + 3: when is a split update the update of the whole batch?

Standard library only, and exact fractions instead of floats, so that "equal" means equal.

    python examples/five_samples.py

The model is a line through the origin, y = w x, with the squared error. The gradient of one sample is
2 x (w x - y); that of the batch is the sum over its five samples divided by five.
"""

from __future__ import annotations

from fractions import Fraction

Sample = tuple[Fraction, Fraction]

SAMPLES: list[Sample] = [(Fraction(x), Fraction(y)) for x, y in [(1, 1), (2, 5), (3, 4), (4, 9), (5, 9)]]
CUT = [SAMPLES[:2], SAMPLES[2:]]  # micro-batches of 2 and of 3 samples
START = Fraction(1)
LEARNING_RATE = Fraction(1, 100)


def gradient_sum(weight: Fraction, samples: list[Sample]) -> Fraction:
    """The summed gradient of some samples: what a backward of a summed loss gives."""
    return sum((2 * x * (weight * x - y) for x, y in samples), Fraction(0))


def gradient_mean(weight: Fraction, samples: list[Sample]) -> Fraction:
    """The mean gradient of some samples: what a backward of a mean loss gives."""
    return gradient_sum(weight, samples) / len(samples)


def whole(weight: Fraction) -> Fraction:
    """The big batch: all five samples at once, one update."""
    return weight - LEARNING_RATE * gradient_mean(weight, SAMPLES)


def counted_first(weight: Fraction) -> Fraction:
    """Right: count the samples of all micro-batches, add up sums, divide once."""
    num_samples = sum(len(samples) for samples in CUT)
    gradient = sum((gradient_sum(weight, samples) / num_samples for samples in CUT), Fraction(0))
    return weight - LEARNING_RATE * gradient


def mean_of_means(weight: Fraction) -> Fraction:
    """Wrong: the mean of the two micro-batches' means. A sample in the small one counts for more."""
    gradient = sum((gradient_mean(weight, samples) for samples in CUT), Fraction(0)) / len(CUT)
    return weight - LEARNING_RATE * gradient


def update_twice(weight: Fraction) -> Fraction:
    """Another thing: an update after each micro-batch. The second starts from a moved weight."""
    for samples in CUT:
        weight = weight - LEARNING_RATE * gradient_mean(weight, samples)
    return weight


def weighted_mean(means: list[int], num_items: list[int]) -> Fraction:
    """The mean over all items, from the means and item counts of the micro-batches."""
    total = sum(Fraction(mean) * count for mean, count in zip(means, num_items, strict=True))
    return total / sum(num_items)


def main() -> None:
    right = whole(START)
    rows = [
        ("the whole batch", right),
        ("counted first, divided once", counted_first(START)),
        ("mean of means", mean_of_means(START)),
        ("two updates", update_twice(START)),
    ]
    print(f"five samples cut 2 + 3, weight {START} before the update\n")
    for name, weight in rows:
        verdict = "equal" if weight == right else f"off by {float(weight - right):+.6f}"
        print(f"  {name:<28} {weight!s:>14}  {float(weight):.6f}  {verdict}")
    assert counted_first(START) == right
    assert mean_of_means(START) != right
    assert update_twice(START) not in (right, mean_of_means(START))

    print("\nthe same with items: the mean over all of them is not the mean of the means\n")
    for means, num_items in [([1, 3], [2, 6]), ([2, 4], [512, 1536])]:
        plain = Fraction(sum(means), len(means))
        exact = weighted_mean(means, num_items)
        print(f"  means {means} over {num_items} items: {exact} = {float(exact)}, not {float(plain)}")
    assert weighted_mean([1, 3], [2, 6]) == Fraction(5, 2)
    assert weighted_mean([2, 4], [512, 1536]) == Fraction(7, 2)


if __name__ == "__main__":
    main()
