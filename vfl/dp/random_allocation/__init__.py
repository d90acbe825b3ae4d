"""Records in batches that nobody knows: the law of the privacy loss, its δ with a certificate, and the least noise for
it."""
