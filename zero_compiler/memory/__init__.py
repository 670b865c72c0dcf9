"""Memory: where buffers lie in an arena, which bytes are live when, and the checks of both."""
