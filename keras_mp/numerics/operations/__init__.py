"""Operations while they run: what they return, where they come from, the first bad one."""
