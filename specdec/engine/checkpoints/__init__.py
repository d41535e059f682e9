"""A checkpoint's files, the format of its weights, and rounding them."""
