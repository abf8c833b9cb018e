"""What memory an operator needs and keeps."""
