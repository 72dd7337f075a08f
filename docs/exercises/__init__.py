"""Exercises: a template a stage, properties that judge an answer, and solutions kept apart."""
