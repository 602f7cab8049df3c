"""Pairs: do two halves belong to the same document?"""
