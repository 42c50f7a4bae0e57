"""Word problems of many steps, made on the fly, and a model that solves some of them: what
studies/learning/trainings.py trains on.
"""
