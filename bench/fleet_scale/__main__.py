"""What grows with a fleet: simulated loads and losses, and counts of messages, up to a thousand targets.

    python -m bench.fleet_scale --markdown bench/results/fleet-scale.md

The fleets decode a 70B model on four H200 each, by the roofline; all figures of them are predictions. Counts follow
from the services' intervals and policies.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from bench.fleet_scale.counts import counts
from bench.fleet_scale.fleets import Case, parts, simulate
from bench.fleet_scale.page import markdown


def main() -> int:
    """Simulate, and print the page or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="file for the page; without it the page is printed")
    parser.add_argument("--targets", default="10,100,1000", help="numbers of targets, by commas")
    parser.add_argument("--subsets", default="0,64", help="the setting `subset_size`, by commas; 0: all targets")
    parser.add_argument("--share", type=float, default=0.75, help="load over what 200 streams for each target are")
    parser.add_argument("--processes", type=int, default=2, help="simulations at once")
    options = parser.parse_args()
    sizes = [int(size) or None for size in options.subsets.split(",")]
    wanted = [(num, size) for num in map(int, options.targets.split(",")) for size in sizes if not size or size < num]
    run = partial(simulate, made_of=parts())
    results = []
    with ProcessPoolExecutor(options.processes) as pool:
        for result in pool.map(run, [Case(num, size, options.share) for num, size in wanted]):
            results.append(result)
            print(result, flush=True)
    text = markdown(results, [counts(num, size) for num, size in wanted])
    if options.markdown:
        options.markdown.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
