"""What is dropped and mended of a document before it is divided into sentences."""
