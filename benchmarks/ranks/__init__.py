"""What the processes of benchmarks with several processes run, and how they are started."""
