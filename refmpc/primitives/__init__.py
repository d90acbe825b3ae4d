"""The protocols on shares: products, truncation, bits, comparison, shuffle, input, opening."""
