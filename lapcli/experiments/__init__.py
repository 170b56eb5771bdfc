"""Many runs: grids and searches choose cells, one runner trains them as processes and resumes interrupted ones."""
