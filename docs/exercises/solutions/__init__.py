"""Answers to the exercises. Look here last."""
