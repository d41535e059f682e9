"""All kinds of heads, one file each."""
