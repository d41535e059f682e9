"""specdec/drafting"""
