"""What of the draws of a graph, which computes every row to the end, is used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.engine.drawing.rows import Draw, DrawRow


def pruned(rows: Sequence[DrawRow], of_rounds: Sequence[Sequence[Draw]]) -> list[list[Draw]]:
    """What rounds would have drawn that end where ``DrawRow`` says so: the same as ``native/ahead.cpp`` draws."""
    drawn: list[list[Draw]] = [[] for _ in rows]
    path_scores = [row.path_score for row in rows]
    active = list(range(len(rows)))
    for number, draws in enumerate(of_rounds):
        goes_on, rest = True, []
        for r in active:
            row, (token_ids, scores) = rows[r], draws[r]
            drawn[r].append(draws[r])
            is_end = math.isnan(scores[0])
            if not is_end:
                shares = [math.exp(score - scores[0]) for score in scores]
                total = sum(shares)
                if len(shares) > 1 and path_scores[r] * (shares[1] / total) >= row.least_fork_score:
                    goes_on = False
                path_scores[r] /= total
                is_end = (
                    number + 1 >= row.num_rounds
                    or path_scores[r] < row.least_path_score
                    or token_ids[0] in row.rule.ends
                )
            if is_end:
                goes_on = goes_on and not row.ends_all
            else:
                rest.append(r)
        if not goes_on or not rest:
            break
        active = rest
    return drawn
