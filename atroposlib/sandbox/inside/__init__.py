"""Code of the sandbox's own processes, with the standard library alone: started by path with
`python -I -S`.
"""
