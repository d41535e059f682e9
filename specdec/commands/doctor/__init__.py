"""`specdec doctor`: the checklist of a deployment, with measurements and remedies."""
