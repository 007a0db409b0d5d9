"""Finished files of the event log on their way to where they are collected."""
