"""Compilation: the entry of ``torch.compile`` and the stages from a captured frame to loaded Programs."""
