"""The side that touches torch: what is patched and hooked while a loop is watched, and put back."""
