"""The heads that there are, a file for each, over the parts that they share."""
