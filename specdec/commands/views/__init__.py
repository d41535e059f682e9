"""Tables and colours that several commands print."""
