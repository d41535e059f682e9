"""The page at `/`: one file, put together when a gateway starts, with the policy under which browsers run it."""
