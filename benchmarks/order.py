"""What it costs one rank to know which samples are its own: SampleOrder beside torch's DistributedSampler.

    python benchmarks/order.py
    python benchmarks/order.py --samples 1000000 --samples 100000000 --replicas 64 --json order.json

Each measurement is a process of its own, so that its peak memory is its own. docs/order.md says what each
column is. DistributedSampler needs about 48 bytes a sample: 4.5 GiB for 10**8.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Found = dict[str, Any]
_WIDTH = 100


class _Samples:
    """A data set of which only the length is asked for."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples


def _ours(options: argparse.Namespace) -> Iterator[int]:
    from wholebatch.order import SampleOrder

    order = SampleOrder(
        num_samples=options.samples, global_batch_samples=options.replicas * options.window_samples
    )
    position = 0
    while order.epoch(position) == 0:
        # One micro-batch a window: how a window is cut costs nothing.
        for micro_batch in order.window(
            position, micro_batch_samples=options.window_samples, replicas=options.replicas, replica=0
        ):
            yield from micro_batch
        position = order.next_position(position)


def _distributed_sampler(options: argparse.Namespace) -> Iterator[int]:
    from torch.utils.data import DistributedSampler

    samples: Any = _Samples(options.samples)
    return iter(DistributedSampler(samples, num_replicas=options.replicas, rank=0, shuffle=True, seed=0))


CONTESTANTS: dict[str, Callable[[argparse.Namespace], Iterator[int]]] = {
    "SampleOrder": _ours,
    "DistributedSampler": _distributed_sampler,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each contestant at each size, print the table, write the JSON; return the exit code."""
    options = _options(arguments)
    if options.alone:
        options.samples = options.samples[0]
        print(json.dumps(_measure(options)))
        return 0
    found = [
        _in_a_process(name, samples, options)
        for samples in options.samples
        for name in CONTESTANTS
        if name == "SampleOrder" or samples <= options.most_listed
    ]
    _show(found, options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, action="append", help="samples of the data set; may repeat")
    parser.add_argument("--replicas", type=int, default=64, help="D; the first one is measured")
    parser.add_argument("--window-samples", type=int, default=256, help="samples of a replica in an update")
    parser.add_argument(
        "--most-listed",
        type=int,
        default=10**8,
        help="DistributedSampler is left out above so many samples",
    )
    parser.add_argument(
        "--most-windows", type=int, default=10_000, help="windows that are asked for, at most an epoch"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--alone", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.samples = options.samples or [10**6, 10**8, 10**12]
    for name in ("replicas", "window_samples", "most_windows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    return options


def _in_a_process(name: str, samples: int, options: argparse.Namespace) -> Found:
    command = [sys.executable, __file__, "--alone", name, "--samples", str(samples)]
    for option in ("replicas", "window_samples", "most_windows"):
        command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(
            f"{name} at {samples} samples ended with code {result.returncode}:\n{result.stderr}"
        )
    measured: Found = json.loads(result.stdout)
    return measured


def _measure(options: argparse.Namespace) -> Found:
    """Take a replica's ids window by window; everything is imported and warm before the clock starts."""
    contestant = CONTESTANTS[options.alone]
    warm = argparse.Namespace(**{**vars(options), "samples": 10_000})
    list(islice(contestant(warm), 10))
    before = _peak_bytes()
    begin = time.perf_counter()
    ids = contestant(options)
    num_ids = len(list(islice(ids, options.window_samples)))
    first = time.perf_counter() - begin
    windows = 1
    while windows < options.most_windows and (window := list(islice(ids, options.window_samples))):
        num_ids += len(window)
        windows += 1
    return {
        "name": options.alone,
        "samples": options.samples,
        "first_window_s": first,
        "windows": windows,
        "ids": num_ids,
        "all_windows_s": time.perf_counter() - begin,
        "peak_growth_bytes": _peak_bytes() - before,
    }


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _show(found: Sequence[Found], options: argparse.Namespace) -> None:
    table = Table(
        title=f"Replica 0 of {options.replicas}, {options.window_samples} samples a window",
        caption="peak memory: the growth of the process over what it was with everything imported",
    )
    table.add_column("samples", no_wrap=True)
    table.add_column("order", no_wrap=True)
    for heading in ("first window", "windows", "all of them", "a window", "peak memory"):
        table.add_column(heading, justify="right")
    for each in found:
        table.add_row(
            f"{each['samples']:,}",
            each["name"],
            _seconds(each["first_window_s"]),
            f"{each['windows']:,}",
            _seconds(each["all_windows_s"]),
            _seconds(each["all_windows_s"] / each["windows"]),
            f"{each['peak_growth_bytes'] / 2**20:,.1f} MiB",
        )
    Console(width=_WIDTH).print(table)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
