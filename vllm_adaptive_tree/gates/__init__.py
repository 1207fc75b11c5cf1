"""Small learnt models that decide while a tree is drafted."""
