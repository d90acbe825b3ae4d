"""What all participants agree on before anything is shared: shapes, scales, noise, claim."""
