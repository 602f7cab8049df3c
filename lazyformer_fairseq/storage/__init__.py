"""Atomic writes of files and folders, and file formats shared by several parts of the package."""
