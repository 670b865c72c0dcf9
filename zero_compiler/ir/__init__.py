"""The graph's own operators, what is known of its nodes, and how both are checked and printed."""
