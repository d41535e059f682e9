"""What the engine process of a target with a model runs, and the messages of both kinds."""
