"""The sections of the trainer's options: each field is a flag and a key of the YAML file.

`config.py` joins them.
"""
