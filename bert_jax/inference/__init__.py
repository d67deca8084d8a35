"""What a trained model computes: masks, scores, vectors, attention, predictions."""
