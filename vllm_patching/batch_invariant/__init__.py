"""Operations whose bits do not depend on the batch, shared by vLLM (see `patches`) and the trainer;
`ops` is the interface.
"""
