"""Ranks: process groups and meshes, what ranks agree on before a call, and how a failing rank tells the others."""
