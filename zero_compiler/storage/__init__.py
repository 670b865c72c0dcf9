"""Storage: files, asynchronous file I/O, pinned buffers and the heap. Nothing here knows a Program."""
