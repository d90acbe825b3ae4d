"""What ``ppvfl doctor`` checks, and who answers it."""
