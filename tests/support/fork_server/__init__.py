"""Starts services of tests without their imports: an engine spends six seconds of CPU on them, and 0.2 on its model.

A *template* is a process that has imported third-party packages and nothing else, and forks itself for every process
asked of it. What it forks is a process like any other: a child of who asked, with the arguments, environment, files and
session that `subprocess.Popen` would have given it. The packages of this repository it imports itself.

Processes that tests start as a user would (`specdec up`, packages, earlier releases) are not started in this way.
"""
