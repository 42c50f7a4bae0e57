"""The parts that run an environment: command line, settings, serving, processing, delivery,
reports.
"""
