"""specdec/constraints"""
