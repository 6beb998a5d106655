"""Tuning records shipped with kda_tl: data only, see README.md beside this file."""
