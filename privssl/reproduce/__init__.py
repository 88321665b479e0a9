"""Runs published tables cell by cell, and keeps what was measured."""
