"""What commands are told: their configuration file, lists of numbers, files of prompts."""
