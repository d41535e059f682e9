"""specdec: a distributed speculative-decoding server.

A small draft model guesses tokens, a large target model checks many guesses in one forward pass, and a
coordinator carries proposals between them and streams the result to clients. The tokens of a request are a
function of the target model, the prompt, the sampling parameters and the seed: speculation only makes them
arrive sooner.
"""

__version__ = "0.2.0"
