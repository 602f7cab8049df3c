"""Tables and pictures of a grid."""
