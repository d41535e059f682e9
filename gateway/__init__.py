"""OpenAI's HTTP interface to coordinators."""
