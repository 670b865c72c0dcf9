"""The figures of the ZeRO papers, planned anew: ``zero-compiler figures``."""
