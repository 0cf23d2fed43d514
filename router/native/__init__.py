"""The router's compiled part: tables of workers, and prompts looked up in them."""
