"""Inputs of several commands: the configuration file, lists of numbers, files of prompts."""
