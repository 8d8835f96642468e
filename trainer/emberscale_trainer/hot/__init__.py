"""Popular choices (FAE, Adnan et al., VLDB 2022): which rows are hot, and which records access hot rows only."""
