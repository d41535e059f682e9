"""specdec/wire"""
