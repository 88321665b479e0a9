"""The label census: a feature map, clusters, and a noisy count of labels."""
