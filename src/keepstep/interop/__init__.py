"""What others read and write, and the trainers that people use: one module or package for each, imported by name."""
