"""Prompts for the demo and the benchmarks, cut from held-out files at natural points."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from transformers import PreTrainedTokenizerFast

from .corpus import SourceFile

MIN_TOKENS, MAX_TOKENS = 64, 200
_TEST_FOLDERS = {"test", "tests", "idle_test"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, Definition) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _head_end(node: Definition) -> int:
    """Last line of the definition's docstring, or of its header if it has none."""
    if ast.get_docstring(node) is not None:
        return node.body[0].end_lineno or node.body[0].lineno
    return max(node.lineno, _first_line(node.body[0]) - 1)


def _cuts(file: SourceFile, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield, for each function, the longest text of whole statements that fits and ends at its head."""
    lines = file.text.splitlines()
    tree = ast.parse(file.text)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    natural = [n for n in nodes if n.col_offset == 0 or (n.col_offset == 4 and isinstance(n, Definition))]
    starts = sorted({_first_line(node) for node in natural})
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        end = _head_end(node)
        for start in starts:
            if start > node.lineno or end - start > 40:
                continue
            text = "\n".join(lines[start - 1 : end]).rstrip()
            if MIN_TOKENS <= len(tokenizer(text).input_ids) <= MAX_TOKENS and not text.endswith("pass"):
                yield text
                break


def build_prompts(
    files: list[SourceFile], tokenizer: PreTrainedTokenizerFast, count: int = 32, per_file: int = 3
) -> list[dict[str, object]]:
    """Return ``count`` prompts from the held-out ``files``, at most ``per_file`` of each."""
    chosen: list[tuple[int, SourceFile, str]] = []
    for file in files:
        cuts = list(_cuts(file, tokenizer))
        picks = sorted({len(cuts) * (2 * i + 1) // (2 * per_file) for i in range(per_file)}) if cuts else []
        chosen.extend((rank, file, cuts[pick]) for rank, pick in enumerate(picks))
    chosen.sort(key=lambda item: (item[0], item[1].path))
    return [
        {
            "id": f"{file.path.removesuffix('.py').replace('/', '.')}-{rank}",
            "file": file.path,
            "num_tokens": len(tokenizer(text).input_ids),
            "kind": "library" if _TEST_FOLDERS.isdisjoint(file.path.split("/")[:-1]) else "tests",
            "text": text,
        }
        for rank, file, text in chosen[:count]
    ]
