"""Tests of the project itself: its documentation, structure, language and public names."""
