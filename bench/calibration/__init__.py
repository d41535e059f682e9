"""`specdec plan`'s simulator against real runs of one machine: `python -m bench --only calibration`.

`inputs.py` measures what the simulator is given, `real.py` runs deployments, `predicted.py` simulates the same
requests, `comparison.py` compares. Nothing is fitted to the compared figures. `python -m bench.calibration FILE.json`
predicts the runs of a saved result again.
"""
