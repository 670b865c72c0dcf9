"""The state of a sharded model: its parameters, where they rest, what its ranks have agreed on, and their protocol."""
