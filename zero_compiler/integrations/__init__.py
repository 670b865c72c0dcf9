"""Sharded training in the tools of others. Each module is imported by who asks for it, and imports its library."""
