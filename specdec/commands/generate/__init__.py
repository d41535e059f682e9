"""specdec/commands/generate"""
