"""From what a client sent to what is to be decoded: checked, tokenized, planned, admitted, or taken up again."""
