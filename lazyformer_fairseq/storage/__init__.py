"""Writes files whole or not at all, and holds the formats that several parts of the project share."""
