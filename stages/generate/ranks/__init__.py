"""How the ranks of one engine run the same steps: rank 0 broadcasts each plan, the others follow."""
