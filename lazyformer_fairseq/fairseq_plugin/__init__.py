"""What is registered with fairseq, and what keeps its trainer safe."""
