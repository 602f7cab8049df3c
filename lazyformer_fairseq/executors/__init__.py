"""The places where jobs run: this machine, Ray and Slurm; and the GPUs of this machine and torch's support for them."""
