"""Stages for Hopper: warps with roles, rings of tiles, bulk copies."""
