"""specdec/replica"""
