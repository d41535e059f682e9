"""What several commands read: the configuration file, lists of numbers, files of prompts."""
