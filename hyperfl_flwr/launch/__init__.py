"""Starts, follows and sizes runs on this machine."""
