"""`specdec doctor`: the checklist of a deployment; measures what can be measured, and says what to do."""
