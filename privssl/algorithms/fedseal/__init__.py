"""FedSEAL: its rounds and learning from complementary labels."""
