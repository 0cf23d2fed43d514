"""Calls of tools in a model's text: formats, and how they are found as the text comes."""
