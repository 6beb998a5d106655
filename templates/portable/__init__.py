"""Stages that run on every target: their results pass through memory."""
