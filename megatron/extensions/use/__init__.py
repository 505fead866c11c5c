"""Use of a trained model."""
