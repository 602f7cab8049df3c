"""Tables and pictures of a grid on SQuAD."""
