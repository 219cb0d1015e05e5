"""From committed slots to files in a directory, and back."""
