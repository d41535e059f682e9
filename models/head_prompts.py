"""Prompts to train heads for the shipped target with: pieces of the standard library's files, none of those held out.

python models/head_prompts.py --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from training.corpus import read_corpus

MIN_CHARS, MAX_CHARS = 60, 400


def main() -> None:
    """Write a prompt per line, the same ones for the same Python version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    files = [file for file in read_corpus() if not file.is_validation]
    with options.out.open("w", encoding="utf-8") as out:
        for _ in range(options.count):
            text = rng.choice(files).text
            start = text.rfind("\n", 0, rng.randrange(len(text)) + 1) + 1
            length = rng.randrange(MIN_CHARS, MAX_CHARS)
            piece = text[start : start + length].rstrip() or text[:length].rstrip()
            out.write(json.dumps({"text": piece}) + "\n")


if __name__ == "__main__":
    main()
