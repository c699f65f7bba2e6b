"""One captured window run again, as one big batch and micro-batch by micro-batch."""
