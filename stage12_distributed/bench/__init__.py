"""What the cases of benchmark.py run, and the command `disaggregated`."""
