"""From the traces of all ranks to a judgement. No torch here, and nothing of the window."""
