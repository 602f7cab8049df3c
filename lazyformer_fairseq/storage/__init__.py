"""Atomic writes of files and folders, and the file formats that several parts of the project share."""
